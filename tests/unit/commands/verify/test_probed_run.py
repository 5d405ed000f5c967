"""What probes work on stays as it was built, whatever a forward does; streams are read by an index."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lanewise.commands.verify.probed_run import FirstSamples, ProbedRun, readable
from lanewise.config import BatchConfig
from tests.distributed.engine.test_between_lanes import Teaching
from tests.distributed.tasks import configure

BATCH = BatchConfig(global_batch_size=8, micro_batch_size=2)


class Lanes:
    """Of each lane so many samples, which say the lane and their number."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        return ((lane, number) for number in range(self.lengths[lane]))


class EqualLanes:
    def __init__(self, *values: int) -> None:
        self.values = values

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        return iter([lane, *self.values]) if lane == 1 else iter(self.values)


def all_of(samples: FirstSamples) -> list[Any]:
    return [samples[index] for index in range(len(samples))]


def test_they_are_those_of_the_first_steps_lane_after_lane():
    found = FirstSamples(Lanes(5, 1, 0, 3), 0, BATCH, 2, missing="error")
    assert all_of(found) == [(0, 0), (0, 1), (1, 0), (3, 0), (3, 1), (0, 2), (0, 3), (3, 2)]


def test_those_of_a_plain_stream_come_as_they_come():
    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    assert all_of(FirstSamples(Plain(), 0, BATCH, 2, missing="error")) == list(range(16))
    assert all_of(readable(Plain(), 0, BATCH, "error", "held_out")) == list(range(8))
    assert readable([1, 2], 0, BATCH, "error", "held_out") == [1, 2]


def test_whoever_changes_a_sample_changes_a_copy():
    class OfTensors:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.zeros(3, 1))

    found = FirstSamples(OfTensors(), 0, BATCH, missing="error")
    found[0].add_(1)
    assert found[0].tolist() == [0]
    assert found[3] == ""


@pytest.mark.parametrize(
    ("stream", "lanes"),
    [
        (Lanes(4, 4, 4, 4), []),
        (Lanes(4, 0, 0, 4), []),
        (EqualLanes(1, 2, 3, 4), [0, 2]),
        (EqualLanes(7, 7, 7, 7), []),
    ],
)
def test_lanes_with_the_same_samples_are_found_unless_all_samples_are_the_same(stream, lanes):
    assert FirstSamples(stream, 0, BATCH, 2, missing="error").equal_lanes() == lanes


def test_a_run_leaves_weights_and_buffers_as_they_were():
    """A buffer that grows in the first forward could not be copied back."""
    probed = ProbedRun(configure(Teaching, num_lanes=8, steps=4), torch.device("cpu"))
    before = {name: value.clone() for name, value in probed.tensors().items()}
    batch = probed.read()
    assert probed.run(probed.turn, batch) == probed.run(probed.turn, batch)
    after = probed.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
