"""A model's buffers between the lanes of a step, and what the user does with them between the steps."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.errors import TaskError
from lanewise.lanes import Placement, Schedule
from lanewise.processes.world.world import LocalWorld

ALONE = LocalWorld(torch.device("cpu"))

NUM_LANES = 4
NUM_SAMPLES = [2, 2, 2, 1]
"""Of each lane, in every step."""


class Steps:
    """Takes steps of four lanes on one process."""

    def __init__(self, *modules: nn.Module) -> None:
        self.buffers = LaneBuffers(
            [modules],
            ALONE,
            Placement.of(NUM_LANES, ALONE),
        )
        self._turns = Schedule(sum(NUM_SAMPLES), 8, 2).turns(range(NUM_LANES), 0, 100)

    def run(self, forward: Callable[[int], object], *, discard: bool = False) -> None:
        """Take a step.

        Args:
            forward: what a lane, by its number, does with the buffers.
            discard: forget what the lanes made of them.
        """
        for turn in self._turns:
            self.buffers.begin()
            forward(turn.lane)
            self.buffers.end(turn, len(turn.positions))
            if turn.is_last:
                break
        if discard:
            self.buffers.discard()
        else:
            self.buffers.merge(self.buffers.changes)


class Holder(nn.Module):
    """Has one buffer, and can do to it what forwards and users do."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.seen: list[float] = []

    def look(self, lane: int) -> None:
        self.seen.append(self.value.sum().item())

    def add_lane(self, lane: int) -> None:
        self.look(lane)
        self.value += lane

    def write(self, value: torch.Tensor) -> None:
        self.value.copy_(value)

    def replace(self, value: torch.Tensor) -> None:
        while value._version < self.value._version:  # so that only the identity tells them apart
            value += 0
        self.value = value


WAYS_TO_WRITE = pytest.mark.parametrize("write", [Holder.write, Holder.replace])
MEAN = (0 * 2 + 1 * 2 + 2 * 2 + 3 * 1) / 7


def test_every_lane_begins_with_the_start_and_the_mean_is_weighted_by_samples():
    holder = Holder(torch.tensor([10.0]))
    steps = Steps(holder)
    steps.run(holder.add_lane)
    assert holder.value.tolist() == pytest.approx([10 + MEAN])
    steps.run(holder.add_lane)
    assert holder.value.tolist() == pytest.approx([10 + 2 * MEAN])
    assert holder.seen == pytest.approx([10] * 4 + [10 + MEAN] * 4)


@WAYS_TO_WRITE
def test_a_queue_that_the_user_fills_between_steps_is_what_the_next_step_sees(write):
    queue = Holder(torch.zeros(3))
    steps = Steps(queue)
    for number in range(4):
        write(queue, torch.full((3,), float(number)))
        steps.run(queue.look)
        assert queue.value.tolist() == [number] * 3
    assert queue.seen == [0.0] * 4 + [3.0] * 4 + [6.0] * 4 + [9.0] * 4


@WAYS_TO_WRITE
def test_what_the_user_makes_of_statistics_is_where_the_next_step_begins(write):
    holder = Holder(torch.tensor([10.0]))
    steps = Steps(holder)
    steps.run(holder.add_lane)
    write(holder, torch.tensor([20.0]))
    steps.run(holder.add_lane)
    assert holder.seen == [10.0] * 4 + [20.0] * 4
    assert holder.value.tolist() == pytest.approx([20 + MEAN])


@WAYS_TO_WRITE
def test_a_lane_may_begin_to_write_in_a_later_step(write):
    """It was an error: a copy of the weights that follows them (`lerp_`) stays equal in the first step."""
    queue = Holder(torch.zeros(3))
    steps = Steps(queue)
    steps.run(queue.look)
    steps.run(lambda lane: write(queue, torch.full((3,), float(lane))))
    assert queue.value.tolist() == pytest.approx([MEAN] * 3)


def test_a_buffer_may_change_in_every_other_step():
    holder = Holder(torch.tensor([10.0]))
    steps = Steps(holder)
    for number in range(4):
        steps.run(holder.add_lane if number % 2 else holder.look)
    assert holder.value.tolist() == pytest.approx([10 + 2 * MEAN])


def test_statistics_that_begin_late_are_merged():
    """batch_norm's kernel gives its statistics no new version, so processes silently had other ones."""
    norm = nn.BatchNorm1d(2)
    steps = Steps(norm)
    rows = torch.randn(4, 6, 2)
    for number in range(3):
        is_late = number == 2

        def forward(lane: int, is_late: bool = is_late) -> None:
            nn.functional.batch_norm(rows[lane], norm.running_mean, norm.running_var, training=is_late)

        steps.run(forward)
    weights = torch.tensor(NUM_SAMPLES) / sum(NUM_SAMPLES)
    expected = 0.1 * (rows.mean(1) * weights.unsqueeze(1)).sum(0)
    torch.testing.assert_close(norm.running_mean, expected)


def test_what_is_written_past_the_version_counter_is_seen():
    holder = Holder(torch.tensor([10.0]))
    steps = Steps(holder)
    steps.run(holder.look)
    steps.run(holder.value.data.add_)
    assert holder.value.tolist() == pytest.approx([10 + MEAN])


@pytest.mark.parametrize("grow", [Holder.replace, lambda holder, value: holder.value.resize_(3).copy_(value)])
def test_a_buffer_may_grow(grow):
    """The observers of quantization begin with an empty buffer, and give it one element a channel."""
    holder = Holder(torch.zeros(0))
    steps = Steps(holder)
    sizes = []

    def forward(lane: int) -> None:
        sizes.append(len(holder.value))
        grow(holder, torch.full((3,), float(lane)))

    for _ in range(2):
        steps.run(forward)
    assert sizes == [0] * 4 + [3] * 4
    assert holder.value.tolist() == pytest.approx([MEAN] * 3)


def test_a_buffer_may_begin_as_none():
    holder = Holder(torch.zeros(2))
    holder.value = None  # type: ignore[assignment]
    steps = Steps(holder)
    steps.run(lambda lane: setattr(holder, "value", torch.full((2,), float(lane))))
    assert holder.value.tolist() == pytest.approx([MEAN] * 2)


@pytest.mark.parametrize("late_lane", [0, 2])
def test_lanes_that_give_a_buffer_different_shapes_are_an_error(late_lane):
    holder = Holder(torch.zeros(0))
    shapes = r"\(2,\) in some lanes and \(3,\)" if late_lane else r"\(3,\) in some lanes and \(2,\)"
    with pytest.raises(TaskError, match=f"buffer value has another shape after step 1: {shapes} in others"):
        Steps(holder).run(lambda lane: holder.replace(torch.zeros(3 if lane == late_lane else 2)))


def test_an_expanded_buffer_can_be_replaced():
    holder = Holder(torch.ones(1).expand(3))
    steps = Steps(holder)
    for _ in range(2):
        steps.run(lambda lane: holder.replace(torch.full((3,), float(lane))))
    assert holder.value.tolist() == pytest.approx([MEAN] * 3)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_buffer_is_averaged(dtype):
    """It was called an integer buffer that differs."""
    holder = Holder(torch.zeros(2, dtype=dtype))
    steps = Steps(holder)
    steps.run(lambda lane: holder.value.add_(complex(lane, -lane)))
    assert holder.value.dtype == dtype
    torch.testing.assert_close(holder.value, torch.full((2,), complex(MEAN, -MEAN), dtype=dtype))


@pytest.mark.parametrize("find", [LaneBuffers.begin, LaneBuffers.check])
def test_an_integer_that_differs_between_lanes_is_found_by_the_next_look(find):
    holder = Holder(torch.tensor(5))
    steps = Steps(holder)
    steps.run(lambda lane: holder.write(torch.tensor(6 if lane < 3 else 13)))
    with pytest.raises(
        TaskError, match="value differs between the lanes of step 1: lane 3 made 13 of it, and the first 6"
    ):
        find(steps.buffers)


def test_an_integer_that_only_some_lanes_write_is_found():
    holder = Holder(torch.tensor(5))
    steps = Steps(holder)
    steps.run(lambda lane: holder.write(torch.tensor(6 if lane < 3 else 5)))
    with pytest.raises(TaskError, match="lane 3 made 5 of it, and the first 6"):
        steps.buffers.check()


def test_an_integer_that_all_lanes_count_alike_counts_the_steps():
    holder = Holder(torch.tensor(2**60))  # which float64 would round
    steps = Steps(holder)
    for _ in range(3):
        steps.run(lambda _: holder.value.add_(1))
    steps.buffers.check()
    assert holder.value.dtype == torch.long
    assert holder.value.item() == 2**60 + 3


def test_a_step_that_is_discarded_leaves_the_start():
    statistics, queue = Holder(torch.tensor([10.0])), Holder(torch.zeros(3))
    steps = Steps(statistics, queue)

    def forward(lane: int) -> None:
        statistics.add_lane(lane)
        queue.look(lane)

    steps.run(forward, discard=True)
    assert statistics.value.tolist() == [10.0]
    steps.run(forward)
    queue.write(torch.ones(3))
    steps.run(forward, discard=True)
    assert statistics.value.tolist() == pytest.approx([10 + MEAN])
    assert queue.value.tolist() == [1.0] * 3


def test_equal_names_in_two_modules_do_not_collide():
    counted, statistics, queue = Holder(torch.tensor(0)), Holder(torch.tensor([10.0])), Holder(torch.zeros(2))
    steps = Steps(counted, statistics, queue)

    def forward(lane: int) -> None:
        counted.value += 1
        statistics.add_lane(lane)

    for _ in range(2):
        steps.run(forward)
    assert counted.value.item() == 2
    assert statistics.value.tolist() == pytest.approx([10 + 2 * MEAN])
    assert queue.value.tolist() == [0.0, 0.0]
    steps.run(counted.value.add_)
    with pytest.raises(TaskError, match="integer buffer 0:value differs"):
        steps.buffers.check()


class Several(nn.Module):
    """Has buffers of many dtypes and sizes, several of which share a pack."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("mask", torch.tensor([[0.0, -torch.inf], [0.1, 0.2]]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.tensor([7, 8]))
        self.register_buffer("narrow", torch.tensor([0.5], dtype=torch.float16))
        self.register_buffer("wide", torch.tensor([0.1], dtype=torch.float64))
        self.register_buffer("eighth", torch.tensor([2.0, 4.0]).to(torch.float8_e4m3fn))
        self.register_buffer("large", torch.arange(20_000.0))
        self.register_buffer("late", None)


def test_of_buffers_that_are_merged_together_the_unchanged_ones_keep_every_bit():
    module = Several()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    steps = Steps(module)

    def forward(lane: int) -> None:
        module.mean += lane
        module.eighth = (module.eighth.float() * 2).to(torch.float8_e4m3fn)
        module.count += 1

    for _ in range(3):
        steps.run(forward)
    steps.buffers.check()
    after = dict(module.named_buffers())
    assert after.pop("mean").tolist() == pytest.approx([1 + 3 * MEAN, 2 + 3 * MEAN])
    assert after.pop("count").item() == 6
    assert after.pop("eighth").tolist() == [16.0, 32.0]
    for name, buffer in after.items():
        assert torch.equal(buffer, before[name]), name


def test_a_constant_that_is_infinite_stays_so_where_a_lane_has_lost_its_samples():
    module = Several()
    buffers = LaneBuffers([[module]], ALONE, Placement.of(2, ALONE))
    for turn, num_samples in zip(Schedule(4, 4, 2).turns(range(2), 0, 1), (2, 0), strict=True):
        buffers.begin()
        module.mean += 1 + turn.lane
        buffers.end(turn, num_samples)
    buffers.merge(buffers.changes)
    assert module.mask.tolist() == [[0.0, -torch.inf], [pytest.approx(0.1), pytest.approx(0.2)]]
    assert module.mean.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("first_to_grow", [0, 2])
def test_one_of_several_buffers_may_grow(first_to_grow):
    """The others of its pack are merged in the same step as before, and in the next ones."""
    module = Several()
    steps = Steps(module)

    def forward(lane: int) -> None:
        module.mean += lane
        module.count += 1
        if steps_taken >= first_to_grow:
            module.mask = torch.full((3,), float(lane))
            module.late = torch.full((1,), 2.0 * lane)

    for steps_taken in range(4):  # noqa: B007 - the forward looks at it
        steps.run(forward)
    steps.buffers.discard()
    assert module.mean.tolist() == pytest.approx([1 + 4 * MEAN, 2 + 4 * MEAN])
    assert module.mask.tolist() == pytest.approx([MEAN] * 3)
    assert module.late.tolist() == pytest.approx([2 * MEAN])
    assert module.count.item() == 7
    assert module.narrow.item() == 0.5


def test_the_integer_that_differs_is_named_among_several():
    module = Several()
    steps = Steps(module)
    steps.run(lambda lane: module.table[1].copy_(torch.tensor(9 + lane // 3)))
    with pytest.raises(
        TaskError, match=r"buffer table differs .* lane 3 made \[7, 10\] of it, and the first \[7, 9\]"
    ):
        steps.buffers.check()


def test_the_user_may_give_buffers_another_shape_between_steps():
    module = Several()
    steps = Steps(module)
    steps.run(module.mean.add_)
    module.mean, module.wide = torch.zeros(3), torch.zeros(1)
    steps.run(module.mean.add_)
    assert module.mean.tolist() == pytest.approx([MEAN] * 3)
    assert module.wide.dtype == torch.float32


def test_a_step_of_one_lane_can_be_discarded():
    holder = Holder(torch.tensor([10.0]))
    buffers = LaneBuffers([[holder]], ALONE, Placement.of(1, ALONE))
    for turn in Schedule(2, 2, 2).turns(range(1), 0, 3):
        buffers.begin()
        holder.add_lane(2)
        buffers.end(turn, 2)
        if turn.step == 1:
            buffers.discard()
        else:
            buffers.merge(buffers.changes)
    assert holder.seen == [10, 12, 12]
    assert holder.value.tolist() == [14.0]
