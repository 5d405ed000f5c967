"""Evaluation on streams: each sample once, and the same floats on any number of processes."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from lanewise import Loss, Task
from lanewise.config import DataConfig, DistributedConfig, RunConfig
from lanewise.data.collate import collate
from lanewise.engine.evaluation.evaluation import build_evaluator
from lanewise.engine.evaluation.evaluator import Evaluator
from lanewise.engine.precision import Precision
from lanewise.engine.run.build import build_model, build_run, build_task
from lanewise.engine.step.lanes import LaneRunner
from lanewise.lanes import Placement
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure
from tests.slow import slow
from tests.unit.engine.own_loop.test_lanes import make_lanes

CLASSES, NUM_LANES, SIZE = 3, 4, 2
UNEVEN = [7, 3, 0, 4]
"""Of the lanes: one ends with a part of a micro-batch, one has nothing, one ends with a whole micro-batch."""
FEW = [5, 0, 0, 0]
CASES: list[list[int] | int] = [UNEVEN, FEW, [0, 0, 0, 2], 21, 16, 3]
"""The lengths of the lanes of a lane-aware stream, or the length of a plain one."""


def sample(number: int) -> tuple[torch.Tensor, int, int]:
    return torch.randn(4, generator=torch.Generator().manual_seed(number)), number % CLASSES, number


class OfLanes:
    """Samples whose numbers tell the lane; a number of steps of random state are drawn between them."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        assert (epoch, num_lanes) == (0, len(self.lengths))
        for number in range(self.lengths[lane]):
            yield sample(100 * lane + number)


class Plain(IterableDataset[Any]):
    """As many samples, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(self.length))


class OnlyOnce(Plain):
    """Has samples for the comparison of the processes, and for nothing else."""

    num_begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_begun += 1
        return super().__iter__() if self.num_begun == 1 else iter(())


class OfProcess(Plain):
    """Yields something else in each process."""

    def __iter__(self) -> Iterator[Any]:
        return ((number, 0, os.getpid()) for number in range(self.length))


def numbers_of(case: list[int] | int) -> list[int]:
    """The numbers of the samples, in the order of predictions."""
    if isinstance(case, int):
        return list(range(case))
    return [100 * lane + number for lane, length in enumerate(case) for number in range(length)]


class Judged(Task):
    """Evaluates on a stream; its collate draws random numbers."""

    def __init__(self, case: list[int] | int, kind: str = "") -> None:
        kinds = {"once": OnlyOnce, "process": OfProcess}
        self.stream: Any = kinds.get(kind, Plain)(case) if isinstance(case, int) else OfLanes(case)
        self.is_iterator = kind == "iterator"
        self.seen: list[int] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    def train_dataset(self) -> Any:
        return Plain(64)

    def eval_datasets(self) -> Mapping[str, Any]:
        return {"held_out": iter(self.stream) if self.is_iterator else self.stream}

    def collate(self, samples: list[Any]) -> Any:
        inputs, labels, numbers = collate(samples)
        return inputs + 0.1 * torch.randn(inputs.shape), labels, numbers

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        weights = 1 + batch[2].float()
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        return Loss((losses * weights).sum(), weights.sum())

    def build_metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": MulticlassAccuracy(CLASSES), "auroc": BinaryAUROC(), "mean": MeanMetric()}

    def update_metrics(self, metrics: Mapping[str, Any], outputs: torch.Tensor, batch: Any) -> None:
        self.seen += batch[2].tolist()
        metrics["accuracy"].update(outputs, batch[1])
        metrics["auroc"].update(outputs[:, 0].sigmoid(), batch[1] == 0)
        metrics["mean"].update(outputs)

    def predict(self, outputs: torch.Tensor, batch: Any) -> Any:
        return {"number": batch[2], "outputs": outputs}


class Compared(Judged):
    """A loss of all samples of a batch."""

    loss = Task.loss

    def batch_loss_inputs(self, batch: Any) -> Any:
        return batch[2]

    def batch_loss(self, model: nn.Module, outputs: torch.Tensor, inputs: Any) -> Loss:
        return Loss((outputs @ outputs.T).logsumexp(1).sum(), weight=len(inputs))


def config_of(
    case: list[int] | int, task: type[Task] = Judged, num_workers: int = 0, **init: Any
) -> RunConfig:
    config = configure(task, num_lanes=NUM_LANES, micro_batch_size=SIZE, case=case, **init)
    return replace(config, data=DataConfig(num_workers=num_workers))


def found(evaluator: Evaluator) -> tuple[Any, ...]:
    """Evaluate twice, and predict; return what came of it, and the samples that this process saw."""
    values, task = evaluator.run(), evaluator.lanes.task
    assert isinstance(task, Judged)
    seen = list(task.seen)
    assert evaluator.run() == values
    outputs = [(one["number"].item(), one["outputs"].tolist()) for one in evaluator.predict("held_out")]
    return values, evaluator.num_samples["held_out"], outputs, seen


def evaluate(world: World, *configs: RunConfig) -> list[Any]:
    """Evaluate, as `lanewise evaluate` and `lanewise predict` do."""
    set_determinism("exact", 1)
    results = []
    for config in configs:
        task, seed = build_task(config), config.train.seed
        lanes = LaneRunner(task, Precision("float32", "cpu"), seed)
        placement = Placement.of(config.batch.num_lanes, world)
        evaluator = build_evaluator(config, lanes, build_model(task, seed), world, placement)
        assert evaluator is not None
        results.append(found(evaluator))
    return results


def evaluate_in_training(world: World, *configs: RunConfig) -> list[Any]:
    """Evaluate with the reducer of training."""
    set_determinism("exact", 1)
    results = []
    for config in configs:
        run = build_run(config, world)
        assert run.evaluation is not None
        results.append(found(run.evaluation._evaluator))
    return results


CONFIGS = [config_of(case) for case in CASES]
COMPARED = [config_of(case, Compared) for case in CASES]


@pytest.fixture(scope="module")
def alone():
    return run_distributed(evaluate, 1, *CONFIGS, *COMPARED)[0]


def test_each_sample_is_evaluated_once_and_predictions_have_the_order_of_the_stream(alone):
    for case, (values, num_samples, outputs, seen) in zip(CASES * 2, alone, strict=True):
        assert num_samples == len(seen)
        assert sorted(seen) == numbers_of(case)
        assert [number for number, _ in outputs] == numbers_of(case)
        means = torch.tensor([of_sample for _, of_sample in outputs])
        assert values["held_out/mean"] == pytest.approx(means.mean().item(), rel=1e-5)
        hits = MulticlassAccuracy(CLASSES)
        hits.update(means, torch.tensor([number % CLASSES for number, _ in outputs]))
        assert values["held_out/accuracy"] == pytest.approx(hits.compute().item(), rel=1e-5)


def test_a_loss_of_a_batch_has_the_micro_batches_of_one_step(alone):
    (plain,) = (index for index, case in enumerate(CASES) if case == 21)
    values, _, outputs, _ = alone[len(CASES) + plain]
    per_step = torch.tensor([of_sample for _, of_sample in outputs]).split(NUM_LANES * SIZE)
    total = sum((one @ one.T).logsumexp(1).sum().item() for one in per_step)
    assert values["held_out/loss"] == pytest.approx(total / 21, rel=1e-5)


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
def test_every_value_is_the_same_float(alone, world_size):
    require_same(run_distributed(evaluate, world_size, *CONFIGS, *COMPARED), alone)


def require_same(results: list[list[Any]], alone: list[Any]) -> None:
    for number, (values, num_samples, outputs, seen) in enumerate(alone):
        of_ranks = [of_rank[number] for of_rank in results]
        assert [one[:2] for one in of_ranks] == [(values, num_samples)] * len(results)
        assert [one[2] for one in of_ranks] == [outputs] + [[]] * (len(results) - 1)
        assert sorted(number for one in of_ranks for number in one[3]) == sorted(seen)


@pytest.mark.parametrize("world_size", [*slow(2), 3])
def test_under_fsdp_all_run_equally_many_forwards(alone, world_size):
    sharded = DistributedConfig(reducer="fsdp", equality="exact", devices=world_size)
    configs = [replace(config, distributed=sharded) for config in (*CONFIGS, *COMPARED)]
    require_same(run_distributed(evaluate_in_training, world_size, *configs), alone)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_loader_workers_change_nothing(alone, world_size):
    configs = [config_of(case, task, num_workers=2) for task in (Judged, Compared) for case in CASES]
    require_same(run_distributed(evaluate, world_size, *configs), alone)


def own_loop(world: World, num_workers: int) -> list[Any]:
    lanes = make_lanes(world, global_batch_size=NUM_LANES * SIZE)
    results = []
    for case in CASES:
        task = Judged(case)
        metrics = task.build_metrics()
        for batch in lanes.evaluate(task.stream, *metrics.values(), num_workers=num_workers):
            task.update_metrics(metrics, batch[0][:, :CLASSES], batch)
        results.append(({name: one.compute().item() for name, one in metrics.items()}, task.seen))
    return results


@pytest.mark.parametrize(("world_size", "num_workers"), [(3, 2), *slow((2, 0), (4, 0))])
def test_metrics_of_an_own_loop_are_the_same_floats(world_size, num_workers):
    (alone,) = run_distributed(own_loop, 1, 0)
    results = run_distributed(own_loop, world_size, num_workers)
    for number, (case, (values, seen)) in enumerate(zip(CASES, alone, strict=True)):
        assert [one[number][0] for one in results] == [values] * world_size
        assert sorted(number_of for one in results for number_of in one[number][1]) == sorted(seen)
        assert sorted(seen) == numbers_of(case)
        inputs = torch.stack([sample(one)[0] for one in numbers_of(case)])[:, :CLASSES]
        assert values["mean"] == pytest.approx(inputs.mean().item(), rel=1e-5)


def error_of(*arguments: Any, world_size: int = 2, **options: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        run_distributed(evaluate, world_size, config_of(*arguments, **options))
    return str(caught.value)


@pytest.mark.parametrize("case", [[0, 0, 0, 0], 0])
def test_an_empty_stream_is_an_error(case):
    assert "DataError: the eval dataset held_out is empty. Check its path, or leave it out." in error_of(case)


def test_a_stream_that_is_empty_the_second_time_is_an_error():
    assert "eval dataset held_out begins with another sample when it is opened" in error_of(9, kind="once")


def test_a_stream_that_differs_between_processes_is_an_error():
    assert "see different streams" in error_of(9, kind="process")


def test_an_iterator_is_an_error_with_the_remedy():
    said = error_of(9, kind="iterator", world_size=1)
    assert "Return an IterableDataset whose __iter__ makes the iterator." in said
