"""A loss of several terms, each divided by its own weight over the global batch, on any number of devices."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from lanewise import Loss
from lanewise.commands.verify.probed_run import evaluate_batch
from lanewise.config import DistributedConfig, FSDPConfig
from lanewise.engine.precision import Precision
from lanewise.engine.run.build import build_model, build_run, build_task
from lanewise.engine.step.lanes import LaneRunner
from lanewise.processes.device.determinism import set_determinism
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, Smooth, configure, gradients, train
from tests.slow import slow


class TwoLosses(Language):
    """The next token by tokens, the size of the first output by samples, and a third of long sentences."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        tokens = super().loss(outputs, batch)
        first = outputs[:, 0].pow(2).mean(-1)
        is_long = (batch != 0).sum(1) > 7
        long = Loss(first.sqrt()[is_long].sum(), is_long.sum(), metrics={"long": (is_long.sum(), len(batch))})
        return [tokens, Loss(first.sum() / 10, len(batch)), long]

    def loss_weights(self, batch: torch.Tensor) -> Any:
        return [(batch[:, 1:] != 0).sum(), len(batch), ((batch != 0).sum(1) > 7).sum()]


class Unknown(TwoLosses):
    """Only the loss knows the weights."""

    def loss_weights(self, batch: torch.Tensor) -> None:
        return None


class SmoothTwo(Smooth, TwoLosses):
    loss = TwoLosses.loss


class SmoothUnknown(SmoothTwo):
    loss_weights = Unknown.loss_weights


class OtherWeights(TwoLosses):
    """Tells other weights than its loss has."""

    def loss_weights(self, batch: torch.Tensor) -> Any:
        tokens, *others = super().loss_weights(batch)
        return [tokens + 1, *others]


class InTensor(TwoLosses):
    """Tells the weights in a tensor."""

    def loss_weights(self, batch: torch.Tensor) -> Any:
        return torch.tensor([float(one) for one in super().loss_weights(batch)])


class SameNames(TwoLosses):
    """Two terms report the same metric."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        return [replace(one, metrics={"size": (1, 1)}) for one in super().loss(outputs, batch)]


class Undeclared(Language):
    """Returns several losses without `loss_weights`."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        return [super().loss(outputs, batch), Loss(outputs.sum(), 1)]


class Wavering(TwoLosses):
    """Knows the weights of some batches."""

    def loss_weights(self, batch: torch.Tensor) -> Any:
        return super().loss_weights(batch) if batch.shape[1] > 7 else None


def by_hand(world, config):
    """Return the gradients of steps, each of one graph over the whole batch."""
    set_determinism("exact", threads=1)
    run = build_run(config, world)
    model, optimizer, runner = run.training.model, run.training.optimizer, run.runner
    seen, lanes = [], []
    for batch in run.loader.batches(0, run.last_step):
        lanes.append(runner.task.loss(runner.lane(batch).forward(model, batch.data), batch.data))
        if not batch.turn.is_last:
            continue
        for terms in zip(*lanes, strict=True):
            if weight := sum(float(one.weight) for one in terms):
                (sum(one.sum for one in terms) / weight).backward(retain_graph=True)
        seen.append({name: one.grad.clone() for name, one in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        lanes = []
    return seen


@pytest.mark.parametrize("task", [SmoothTwo, SmoothUnknown])
def test_gradients_are_those_of_the_means_over_the_global_batch(task):
    config = configure(task, optimizer="torch.optim.SGD", lr=0.05)
    (expected,) = run_distributed(by_hand, 1, config)
    for world_size in (1, 3):
        for found in run_distributed(gradients, world_size, config):
            for mine, theirs in zip(found, expected, strict=True):
                assert max((mine[name] - value).abs().max() for name, value in theirs.items()) < 1e-12


def configured(
    reducer: str, num_devices: int, task: Any, precision: Any = "float32", equality: Any = "exact"
):
    distributed = DistributedConfig(
        reducer=reducer,  # type: ignore[arg-type]
        devices=num_devices,
        device_type="cpu",
        equality=equality,
        fsdp=FSDPConfig(blocks=("TransformerEncoderLayer",)),
    )
    return replace(configure(task, precision=precision), distributed=distributed)


LAYOUTS = (("ddp", 4), ("data_parallel", 2), ("ddp", 2), ("balanced_data_parallel", 3), ("fsdp", 3))


@pytest.mark.parametrize(
    ("task", "precision", "layouts"),
    [
        (TwoLosses, "fp16", LAYOUTS[:2]),
        *slow(*product((TwoLosses, Unknown), ("float32", "fp16"), (LAYOUTS,))),
    ],
)
def test_each_reducer_leaves_the_bytes_of_one_device(task, precision, layouts):
    (alone,) = run_distributed(train, 1, configured("single", 1, task, precision))
    for layout in layouts:
        config = configured(*layout, task, precision)
        for result in run_distributed(train, config.distributed.num_processes or 1, config):
            assert result == alone, layout


def test_weights_may_be_in_a_tensor():
    (expected,) = run_distributed(train, 1, configure(TwoLosses))
    assert run_distributed(train, 2, configure(InTensor)) == [expected] * 2


def evaluate(world, config):
    runner = LaneRunner(build_task(config), Precision("float32", "cpu"), 0)
    model = build_model(runner.task, 0)
    return evaluate_batch(runner, model, {"test": runner.task.train_dataset()}, world, config)


def test_evaluation_adds_the_means_of_the_terms_over_the_dataset():
    config = configure(SmoothTwo, micro_batch_size=7)
    (alone,) = run_distributed(evaluate, 1, config)
    for world_size in (2, 3):
        assert run_distributed(evaluate, world_size, config) == [alone] * world_size
    task = SmoothTwo()
    model = build_model(task, 0).eval()
    dataset = task.train_dataset()
    batch = task.collate([dataset[index] for index in range(len(dataset))])
    terms = task.loss(model(batch), batch)
    expected = sum(one.sum.item() / float(one.weight) for one in terms)
    assert alone["test/loss"] == pytest.approx(expected, rel=1e-12)
    assert set(alone) == {"test/loss", "test/long"}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Undeclared, r"the loss of Undeclared returned several losses\. .*give the task loss_weights"),
        (OtherWeights, r"has the weights \[.*\], and loss_weights gave \[.*return the same weights"),
        (SameNames, "reports the metric size with several of its terms"),
        (Wavering, "loss_weights of Wavering returns None for some batches only"),
    ],
)
def test_wrong_use_is_one_clear_error(task, said):
    with pytest.raises(RuntimeError, match=said):
        run_distributed(train, 2, configure(task))
