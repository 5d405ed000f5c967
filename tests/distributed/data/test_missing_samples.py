"""Samples that a dataset gives as None are left out, alike everywhere, weight and all.

The first lane of the second step loses every sample, lanes of others some, and none of the steps all of them.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchmetrics import MeanMetric

from lanewise import Task
from lanewise.commands.jobs.train import TrainJob
from lanewise.commands.verify.audit import Audit
from lanewise.commands.verify.verify import verify
from lanewise.config import DataConfig, FSDPConfig, OrderConfig, RunConfig
from lanewise.engine.evaluation.evaluation import build_evaluator
from lanewise.engine.precision import Precision
from lanewise.engine.run.build import build_model, build_run, build_task
from lanewise.engine.step.lanes import LaneRunner
from lanewise.errors import DataError
from lanewise.lanes import Placement
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.contrastive import ByRows, Contrastive
from tests.distributed.data.test_lost_samples import DamagedLanguage, Normed
from tests.distributed.reduce.test_reducers import configured, run, train, train_part
from tests.distributed.streams import LENGTHS, sentence
from tests.distributed.tasks import Sentences
from tests.slow import slow
from tests.unit.engine.own_loop.test_lanes import make_lanes, state_of

LOST = frozenset({3, 16, 17, 21, 31, 32, 33, 44})
"""Of 53 samples in steps of sixteen, in eight lanes of two."""


class Gaps(Dataset[Any]):
    """A dataset without some of its samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return None if index in LOST else self.dataset[index]


class Gappy(DamagedLanguage):
    """Trains and evaluates on sentences with gaps."""

    def train_dataset(self) -> Dataset[Any]:
        return Gaps(Sentences(self.num_samples))

    def eval_datasets(self) -> dict[str, Any]:
        return {"held_out": Gaps(Sentences(self.num_samples)), "stream": self.stream()}

    def stream(self) -> Any:
        return GappyLanes()

    def predict(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        return batch[:, 0]


class GappyNormed(Gappy):
    """With BatchNorm, whose statistics are of the samples that are there."""

    build_model = Normed.build_model


class GappyLanes:
    """Lanes that end at different times, some of which begin or end with a gap, or are nothing else."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        for number in range(LENGTHS[lane]):
            yield None if lane == 1 or number in (1, 6) else sentence(epoch, lane, number)


class GappyPlain(IterableDataset[Any]):
    """The first three of each twenty are gaps."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(90):
            yield None if number % 20 < 3 else sentence(number)


class GappyStream(Gappy):
    """Trains on the lanes."""

    train_dataset = Gappy.stream


class GappyPlainStream(GappyStream):
    """Trains and evaluates on the plain one."""

    def stream(self) -> Any:
        return GappyPlain()

    train_dataset = stream


class GappyContrastive(Contrastive):
    """One loss of all samples that are there."""

    def train_dataset(self) -> Any:
        return Gaps(super().train_dataset())


class GappyRows(GappyContrastive, ByRows):
    """The same by rows."""

    batch_loss = Task.batch_loss


def gappy(task: type[Task] = Gappy, layout: tuple[str, int] = ("single", 1), **options: Any) -> RunConfig:
    names = ("num_workers", "shuffle_buffer", "missing")
    data = {"missing": "skip"} | {name: options.pop(name) for name in names if name in options}
    if "Stream" not in task.__name__:
        data["order"] = OrderConfig(class_path="sequential")
    config = configured(*layout, task=task, **options)  # type: ignore[arg-type]
    blocks = (
        ("Linear",) if task in (GappyNormed, GappyContrastive, GappyRows) else ("TransformerEncoderLayer",)
    )
    distributed = replace(config.distributed, fsdp=FSDPConfig(blocks=blocks))
    return replace(config, data=DataConfig(**data), distributed=distributed)


def outcomes(world: World, configs: Sequence[RunConfig]) -> list[Any]:
    """Train with each configuration in one world; return the bytes and losses."""
    found = []
    for config in configs:
        state, losses = train(world, config)
        found.append((state, losses))
    return found


def same(configs: Sequence[RunConfig], world_size: int) -> None:
    """Require that each leaves what one device leaves of the same task."""
    alone = [gappy(kind_of(config), precision=config.precision) for config in configs]
    (expected,) = run_distributed(outcomes, 1, alone)
    assert run_distributed(outcomes, world_size, configs) == [expected] * world_size


TASKS = (Gappy, GappyNormed, GappyStream, GappyPlainStream, GappyContrastive, GappyRows)


def kind_of(config: RunConfig) -> type[Task]:
    return next(task for task in TASKS if config.task.class_path.endswith(f".{task.__name__}"))


@pytest.mark.parametrize("world_size", slow(2, 3))
def test_the_bytes_are_those_of_one_process(world_size):
    layouts = [("ddp", world_size), ("fsdp", world_size)]
    configs = [gappy(task, layout) for layout in layouts for task in TASKS]
    configs += [gappy(task, layouts[0], num_workers=2) for task in (Gappy, GappyStream, GappyPlainStream)]
    configs += [gappy(task, layout, precision="bf16") for layout in layouts for task in (Gappy, GappyStream)]
    same(configs, world_size)


def test_several_devices_of_a_process_leave_them_too():
    layouts = [("data_parallel", 3), ("balanced_data_parallel", 2)]
    same([gappy(task, layout) for layout in layouts for task in TASKS], 1)


def evaluations(world: World, configs: Sequence[RunConfig]) -> list[Any]:
    """Evaluate and predict with untrained models, with the reducer of training and without one."""
    set_determinism("exact", 1)
    found: list[Any] = []
    for config in configs:
        built = build_run(config, world)
        assert built.evaluation is not None
        found.append(built.evaluation.run()[0])
        task, seed = build_task(config), config.train.seed
        lanes = LaneRunner(task, Precision("float32", "cpu"), seed)
        placement = Placement.of(config.batch.num_lanes, world)
        evaluator = build_evaluator(config, lanes, build_model(task, seed), world, placement)
        assert evaluator is not None
        predicted = {name: evaluator.predict(name) for name in ("held_out", "stream")}
        found.append({name: list(map(str, outputs)) for name, outputs in predicted.items() if not world.rank})
    return found


def test_evaluation_and_prediction_leave_them_out_too():
    (alone,) = run_distributed(evaluations, 1, [gappy(), gappy(GappyPlainStream)])
    sentences = Sentences(53).sentences
    lengths = [len(tokens) for number, tokens in enumerate(sentences) if number not in LOST]
    assert alone[0]["held_out/length"] == pytest.approx(sum(lengths) / len(lengths))
    expected = [None if number in LOST else tokens[0] for number, tokens in enumerate(sentences)]
    assert alone[1]["held_out"] == list(map(str, expected))
    in_lanes = [[*GappyLanes().iter_lane(0, lane, 8)] for lane in range(8)]
    assert alone[1]["stream"] == [str(one if one is None else one[0]) for lane in in_lanes for one in lane]
    for reducer in ("ddp", "fsdp"):
        configs = [
            gappy(task, (reducer, 3), num_workers=workers)
            for task, workers in ((Gappy, 2), (GappyPlainStream, 0))
        ]
        first, *others = run_distributed(evaluations, 3, configs)
        assert first == alone
        assert [found[::2] for found in others] == [alone[::2]] * 2


@pytest.mark.parametrize("task", [Gappy, *slow(GappyStream)])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_another_number(tmp_path, task):
    (state, _), folder = run(gappy(task, shuffle_buffer=5 * (task is GappyStream))), str(tmp_path)
    for (*layout,), last_step in ((("ddp", 3), 2), (("fsdp", 2), 3), (("single", 1), 5)):
        config = gappy(task, tuple(layout), shuffle_buffer=5 * (task is GappyStream))
        found = run(config, train_part, folder, last_step)
    assert found == state


def own_loop(world: World) -> list[Any]:
    """Train in a loop of one's own, and evaluate."""
    lanes = make_lanes(world)
    task = Gappy()
    model = lanes.prepare(task.build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for dataset in (task.train_dataset(), GappyLanes()):
        for step in lanes.steps(dataset, collate=task.collate, missing="skip"):
            for batch in step:
                step.backward(task.loss(model(batch), batch))
            optimizer.step()
    length = MeanMetric()
    for batch in lanes.evaluate(task.train_dataset(), length, collate=task.collate, missing="skip"):
        length.update((batch != 0).sum(dim=1))
    return [*state_of(model), {"length": length.compute().numpy().tobytes()}]


def test_an_own_loop_leaves_them_out_too():
    (alone,) = run_distributed(own_loop, 1)
    assert run_distributed(own_loop, 3) == [alone] * 3


def refusal(world: World, config: RunConfig) -> str:
    with pytest.raises(DataError) as caught:
        train(world, config)
    return str(caught.value)


class Forgetful(Gappy):
    """The mistake: a dataset without a return, whose gaps are meant to be few."""

    def train_dataset(self) -> Any:
        dataset = Gaps(Sentences(self.num_samples))
        type(dataset.dataset).__getitem__ = lambda *_: None  # type: ignore[method-assign]
        return dataset


def test_a_missing_sample_is_an_error_unless_it_is_asked_for():
    (text,) = run_distributed(refusal, 1, gappy(missing="error"))
    assert "of the training data is None. Let the dataset return a sample" in text
    assert "data.missing=skip" in text


def test_a_global_batch_of_nothing_is_an_error_on_every_process():
    for world_size in (1, 3):
        for text in run_distributed(refusal, world_size, gappy(Forgetful, ("ddp", world_size))):
            assert "the dataset gave None for all samples of step 1, such as samples [" in text


class NoLastStep(Gappy):
    """An epoch whose last step, which not all lanes have, loses all its samples."""

    def train_dataset(self) -> Any:
        whole = Sentences(self.num_samples)
        return [whole[index] if index < 48 else None for index in range(self.num_samples)]


def test_the_last_step_of_an_epoch_may_lose_all_its_samples():
    """It was taken for a dataset without a return, and ended the run at each --resume."""
    (((alone, losses),),) = run_distributed(outcomes, 1, [gappy(NoLastStep)])
    for ((state, on_rank),) in run_distributed(outcomes, 3, [gappy(NoLastStep, ("ddp", 3))]):
        assert state == alone
        assert repr(on_rank) == repr(losses)  # NaN in the step without samples


def audited(world: World, config: RunConfig) -> list[str]:
    """Train with an audit; return what rank 0 said of samples that are left out."""
    said: list[str] = []
    logger = logging.getLogger("lanewise")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    set_determinism("exact", threads=1)
    TrainJob(config, is_audited=True).run(world)
    return [text for text in said if "left out" in text]


@pytest.mark.parametrize("task", [Gappy, *slow(GappyStream)])
def test_they_are_counted_and_one_is_named(tmp_path, task):
    config = gappy(task, ("ddp", 2), num_workers=2)
    train_config = replace(config.train, run_dir=str(tmp_path), max_steps=None, epochs=2)
    said, _ = run_distributed(audited, 2, replace(config, train=train_config))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    report = Audit(tmp_path / "audit").check()
    assert report.is_good, report.problems
    assert report.num_epochs == 2
    if task is GappyStream:
        num_samples, num_lost = sum(LENGTHS), 2 + 5 + 3
        first = "sample 1 of the training data"
    else:
        num_samples, num_lost = 53, len(LOST)
        first = "sample 3 of the training data"
        assert "step 2, lane 0: 2 samples could not be read" in report.notes
    assert report.num_samples == 2 * (num_samples - num_lost)
    assert [line["data/skipped_samples"] for line in lines if "data/skipped_samples" in line] == [
        num_lost
    ] * 2
    named = [text.partition(" is None")[0] for text in said if "is None (data.missing is skip)" in text]
    assert named[0] == f"left out: {first}"
    assert len(named) == 3, said  # one of each eval dataset, which is evaluated several times
    assert f"epoch 2: {num_lost} samples left out, as they cannot be read" in said


@pytest.mark.slow
def test_verify_finds_nothing_wrong():
    for task in (Gappy, GappyStream):
        assert verify(gappy(task, ("ddp", 2)), [2], num_steps=3).is_verified
