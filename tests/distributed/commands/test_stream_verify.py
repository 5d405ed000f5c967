"""Streams of both kinds verify on any number of processes, and planted mistakes in them are named."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from lanewise import Task
from lanewise.commands.verify import verify as module
from lanewise.config import DataConfig, RunConfig
from tests.distributed.commands.test_verify import _fast_processes, verify  # noqa: F401 - a fixture
from tests.distributed.tasks import configure
from tests.slow import slow

LENGTHS = (10, 4, 0, 7)


def sample(*numbers: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(
        sum(number * 100**place for place, number in enumerate(numbers))
    )
    return torch.randn(4, generator=generator), numbers[0] % 3


class Lanes:
    """Lanes of different lengths, some of which end in the first steps."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        assert num_lanes == len(LENGTHS)
        for number in range(LENGTHS[lane]):
            yield sample(number, lane, epoch)


class Plain(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(21))


class IgnoresItsLane:
    def iter_lane(self, _epoch: int, _lane: int, _num_lanes: int) -> Iterator[Any]:
        return map(sample, range(9))


class SharesTwoFiles:
    """Has fewer files than lanes."""

    def iter_lane(self, epoch: int, lane: int, _num_lanes: int) -> Iterator[Any]:
        return (sample(number, lane % 2, epoch) for number in range(9))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class KnowsTheRank(IterableDataset[Any]):
    """Takes every n-th sample, as a stream for other libraries does."""

    def __iter__(self) -> Iterator[Any]:
        size = dist.get_world_size() if dist.is_initialized() else 1
        return map(sample, range(rank(), 64, size))


class KnowsTheRankInLaterLanes:
    def iter_lane(self, epoch: int, lane: int, _num_lanes: int) -> Iterator[Any]:
        for number in range(9):
            yield sample(number, lane, epoch, rank() if lane else 0)


class Remembers:
    """Begins anew when it is opened again, and goes on with what depends on all that was read before."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        yield sample(0)
        for _ in range(15):
            self.num_read += 1
            yield sample(self.num_read)


class Learns(Task):
    def __init__(self, stream: str) -> None:
        self.stream = stream

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))

    def train_dataset(self) -> Any:
        return globals()[self.stream]()

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        output: torch.Tensor = model(batch[0])
        return output

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch[1])


def config(stream: type, *, equality: str = "exact", **data: Any) -> RunConfig:
    run = configure(Learns, num_lanes=4, stream=stream.__name__, equality=equality)
    train = replace(run.train, max_steps=None, epochs=2)
    return replace(run, train=train, data=DataConfig(**data))


@pytest.mark.parametrize(
    ("stream", "equality"), [(Plain, "exact"), *slow((Plain, "close"), (Lanes, "exact"), (Lanes, "close"))]
)
def test_streams_of_both_kinds_verify_and_resume_on_other_processes(stream, equality):
    report = verify(config(stream, equality=equality), 2, 3, resumes=equality == "exact")
    assert (report.is_verified, list(report.findings)) == (True, [])
    assert [*report.steps] == [1, 2, 3]
    if equality == "close":
        assert all(one.close is not None and one.close.num_elements for one in report.layouts[2:])


@pytest.mark.parametrize("stream", [Lanes, *slow(Plain)])
def test_streams_verify_in_shuffled_windows_read_by_a_loader_process(stream):
    report = verify(config(stream, shuffle_buffer=4, num_workers=1), 2)
    assert (report.is_verified, list(report.findings)) == (True, [])


@pytest.mark.slow
def test_a_stream_that_ends_before_all_steps_are_taken_verifies():
    run = config(Plain)
    run = replace(run, train=replace(run.train, epochs=1))
    report = module.verify(run, [2], num_steps=9)
    assert (report.is_verified, len(report.steps)) == (True, 3)


@pytest.mark.parametrize(
    ("stream", "cause", "evidence"),
    [
        (IgnoresItsLane, "a stream ignores its lane", "lanes 0 and 1 have the same samples"),
        (
            KnowsTheRank,
            "the dataset shards itself by rank",
            "sample 1 in rank 0 of 2 processes equals sample 2 in one process",
        ),
        *slow(
            (SharesTwoFiles, "a stream ignores its lane", "lanes 0 and 2 have the same samples"),
            (
                KnowsTheRankInLaterLanes,
                "samples depend on the rank or the number of processes",
                "differs between rank 1 of 2 processes and one process",
            ),
            (Remembers, "a sample differs from read to read", "also changed: dataset.num_read"),
        ),
    ],
)
def test_a_mistake_in_a_stream_is_named(stream, cause, evidence):
    report = verify(config(stream), 2)
    assert [finding.cause for finding in report.findings] == [cause]
    assert evidence in report.findings[0].evidence
