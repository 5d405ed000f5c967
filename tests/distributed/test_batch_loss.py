"""A loss of all samples of a step: the gradient of one graph over the global batch, and the same bytes on any N."""

from itertools import groupby

import pytest
import torch

from lanewise import Loss
from lanewise.device.determinism import set_determinism
from lanewise.engine.run.build import build_run
from lanewise.engine.step.batch_loss import TaskLoss
from lanewise.testing import run_distributed
from tests.distributed.contrastive import LOSSES, ByRows, Contrastive
from tests.distributed.tasks import configure, gradients, train

CASES = [(Contrastive, {"loss": name}) for name in LOSSES] + [(ByRows, {"loss": "clip"})]


@pytest.mark.parametrize(("task", "arguments"), CASES, ids=str)
def test_bytes_do_not_depend_on_the_number_of_processes(task, arguments):
    config = configure(task, **arguments)
    (alone,) = run_distributed(train, 1, config)
    for world_size in (2, 3, 4):
        for result in run_distributed(train, world_size, config):
            assert result == alone


def by_hand(world, config):
    """Train with one graph over the whole batch; return the gradients of each step."""
    set_determinism("exact", threads=1)
    run = build_run(config, world)
    model, optimizer, task = run.training.model, run.training.optimizer, run.training.runner.task
    whole = TaskLoss(run.training.runner)
    seen = []
    for _, lanes in groupby(run.loader.batches(0, run.last_step), lambda batch: batch.turn.step):
        outputs, inputs = [], []
        for batch in lanes:
            outputs.append(whole.lane(batch).forward(model, batch.data))
            inputs.append(task.batch_loss_inputs(batch.data))
        joined = {key: torch.cat([one[key] for one in outputs]) for key in outputs[0]}
        labels, rows = torch.cat(inputs), slice(0, len(joined["first"]))
        returned = whole.compute(model, (joined, labels), rows)
        (returned.sum / returned.weight if isinstance(returned, Loss) else returned).backward()
        named = list(model.named_parameters())
        seen.append({n: torch.zeros_like(one) if one.grad is None else one.grad.clone() for n, one in named})
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(("task", "arguments"), CASES, ids=str)
def test_gradients_are_those_of_one_graph_over_the_whole_batch(task, arguments):
    config = configure(task, **arguments, double=True, optimizer="torch.optim.SGD", lr=0.05)
    (expected,) = run_distributed(by_hand, 1, config)
    assert len(expected) == 9
    for world_size in (1, 3):
        for found in run_distributed(gradients, world_size, config):
            for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                assert mine.keys() == theirs.keys()
                for name, value in mine.items():
                    assert (value - theirs[name]).abs().max() < 1e-12, (step, name)


def test_without_batch_norm_the_gradient_does_not_depend_on_the_micro_batch():
    found = [
        run_distributed(
            gradients,
            1,
            configure(
                Contrastive,
                num_lanes=16 // size,
                micro_batch_size=size,
                loss="nt_xent",
                dropout=0.0,
                double=True,
                optimizer="torch.optim.SGD",
            ),
        )[0]
        for size in (1, 4, 16)
    ]
    for steps in zip(*found, strict=True):
        for name, value in steps[0].items():
            assert all((other[name] - value).abs().max() < 1e-12 for other in steps[1:]), name
