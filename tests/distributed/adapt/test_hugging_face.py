"""A GPT-2 and a BERT of Hugging Face, as the documentation's tasks of 15 lines."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, gradients, train
from tests.slow import slow

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="not installed: transformers")
TASKS = "tests.distributed.hugging_face"
"""Which the processes import that train."""


@pytest.mark.parametrize("task", ["GPT2", *slow("Bert")])
def test_one_to_three_processes_give_the_same_bytes(task):
    # 45 sentences in steps of 16: the third of an epoch has 13 of them, on 7 of the 8 lanes.
    config = configure(f"{TASKS}.{task}", steps=4)
    alone = run_distributed(train, 1, config)[0]
    for world_size in (2, 3):
        for result in run_distributed(train, world_size, config):
            assert result == alone


def keep_float64() -> None:
    """Keep transformers from rounding GPT-2's logits to float32 before their loss."""
    torch.Tensor.float = torch.Tensor.double


def gradient(world, config):
    """Return the gradient that the optimizer got in the first step."""
    keep_float64()
    return gradients(world, config)[0]


def full_batch_gradient(world, config):
    """Return what plain torch makes of the first step's micro-batches as one big batch, and their weights."""
    keep_float64()
    set_determinism("exact", threads=1)
    engine = build_engine(config, world)
    task = engine.run.runner.task
    model = task.build_model()
    model.load_state_dict(engine.training.model.state_dict())
    next(engine.steps())
    batch = {
        name: pad_sequence([row for batch in task.batches for row in batch[name]], True, padding)
        for name, padding in import_module(TASKS).PADDING.items()
    }
    model(**batch).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, task.weights


def one_step(task: str, micro_batch_size: int) -> Any:
    options = {"num_lanes": 12 // micro_batch_size, "micro_batch_size": micro_batch_size, "steps": 1}
    return configure(f"{TASKS}.{task}", optimizer="torch.optim.SGD", **options)


@pytest.mark.parametrize("task", [*slow("SmoothGPT2"), "SmoothBert"])
def test_a_step_has_the_gradient_of_one_big_batch(task):
    """Also where some micro-batches have no target: there the model's loss is NaN."""
    config = one_step(task, micro_batch_size=1)
    expected, weights = run_distributed(full_batch_gradient, 1, config)[0]
    assert 0 in weights
    assert len(set(weights)) > 5
    for world_size in (1, 2):
        for found in run_distributed(gradient, world_size, config):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("task", "mistake"),
    [("SmoothGPT2", "BareGPT2"), ("SmoothGPT2", "UnshiftedGPT2"), ("SmoothBert", "BareBert")],
)
def test_the_bare_loss_or_another_weight_gives_another_gradient(task, mistake):
    expected, weights = run_distributed(full_batch_gradient, 1, one_step(task, micro_batch_size=4))[0]
    assert 0 not in weights
    (found,) = run_distributed(gradient, 1, one_step(mistake, micro_batch_size=4))
    ours, theirs = (torch.cat([grads[name].flatten() for name in expected]) for grads in (found, expected))
    assert (ours - theirs).norm() > 1e-4 * theirs.norm()
