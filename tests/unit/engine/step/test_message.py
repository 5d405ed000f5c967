"""What processes tell each other in a step: whoever carries which lanes, all know the same."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lanewise.engine.step.message import LaneRow, StepMessage, StepTotals, Term
from lanewise.errors import WorldError

CPU = torch.device("cpu")


class Ranks:
    """Processes of which each tells its message before one of them hears all."""

    world_size = 2

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self.told: list[torch.Tensor] = []

    def start_all_gather(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.told.append(numbers)
        return lambda: torch.stack(self.told)


def exchanged(*messages: StepMessage, most_lanes: int) -> StepTotals:
    world = Ranks()
    present = sorted(row.lane for one in messages for row in one.rows)
    *_, wait = [one.start_exchange(world, most_lanes, present) for one in messages]
    return wait()


def message(rows, *, saves=False, changes=()) -> StepMessage:
    num_terms = max((len(row.terms) for row in rows), default=1)
    return StepMessage(rows, saves, False, False, changes, num_terms)


@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_any_process_may_carry_any_lanes(carriers, absent):
    rows = [LaneRow(lane, (Term(0.5 * lane, float(lane), 3.0),)) for lane in range(8)]
    present = [row for row in rows if not absent[row.lane]]
    each = [message([row for row in present if carriers[row.lane] == rank]) for rank in range(3)]
    totals = exchanged(*each, most_lanes=8)
    assert totals.lanes == [LaneRow(row.lane, (Term(1.5 * row.lane, row.weight),)) for row in present]
    assert totals.loss_sum == math.fsum(1.5 * row.lane for row in present)
    assert totals.weight == math.fsum(row.weight for row in present)


@pytest.mark.parametrize("vote", ["wants_save", "wants_stop", "wants_end"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_vote_is_enough_and_the_largest_change_counts(rank, vote):
    each = [message([], changes=[0.0, 2.0]), message([], changes=[1.0, 0.0])]
    setattr(each[rank], vote, True)
    totals = exchanged(*each, most_lanes=3)
    votes = {name: getattr(totals, name) for name in ("wants_save", "wants_stop", "wants_end")}
    assert votes == {name: name == vote for name in votes}
    assert totals.buffer_changes == [1.0, 2.0]
    assert (totals.lanes, totals.weight) == ([], 0.0)


def test_a_loss_that_is_not_finite_is_told_as_it_is():
    totals = exchanged(message([LaneRow(0, (Term(math.inf, 1.0, 2.0),))]), message([]), most_lanes=1)
    assert (totals.lanes[0].loss_sum, totals.allow_update) == (math.inf, False)
    assert math.isnan(totals.loss_sum)


def test_an_accelerator_tells_the_same_without_reading_its_losses():
    rows = [
        LaneRow(4, (Term(0.25, 8.0, 8.0), Term(0.5, 3.0))),
        LaneRow(5, (Term(0.0, 0.0), Term(-0.75, 2.0, 2.0))),
    ]
    there = [
        LaneRow(
            row.lane,
            tuple(one._replace(value=torch.tensor(one.value)) if one.weight else one for one in row.terms),
        )
        for row in rows
    ]
    there[1] = there[1]._replace(
        terms=(there[1].terms[0], Term(there[1].terms[1].value, torch.tensor(2), 2.0))
    )
    expected = message(rows, saves=True, changes=[1.0, 0.0])._numbers(3)
    changes = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert torch.equal(message(there, saves=True, changes=changes)._numbers_on(CPU, 3), expected)
    assert torch.equal(message([])._numbers_on(CPU, 1), message([])._numbers(1))


@pytest.mark.parametrize("on_device", [False, True])
def test_each_process_tells_how_long_it_computes(on_device):
    world, waits = Ranks(), []
    for seconds in (0.5, math.nan, 0.25):
        row = LaneRow(len(waits), (Term(torch.tensor(1.0) if on_device else 1.0, 2.0),))
        changes = torch.tensor([1.0], dtype=torch.float64) if on_device else [1.0]
        one = StepMessage([row], False, True, False, changes, computed_seconds=seconds)
        if on_device:
            world.told.append(one._numbers_on(CPU, 2))
        waits.append(one.start_exchange(Ranks() if on_device else world, 2, range(3)))
    if on_device:
        waits[-1] = one.start_exchange(world, 2, range(3))
        world.told.pop()
    totals = waits[-1]()
    assert totals.computed_seconds == pytest.approx([0.5, math.nan, 0.25], nan_ok=True)
    assert (totals.wants_save, totals.wants_stop, totals.buffer_changes) == (False, True, [1.0])
    assert (totals.loss_sum, totals.weight) == (3.0, 6.0)


def test_a_row_may_have_several_terms():
    """As a loss of several terms, or of samples that are whole in no lane, needs them."""
    rows = [LaneRow(lane, (Term(0.5 * lane, 1.0), Term(-1.0, float(lane), 2.0))) for lane in range(3)]
    each = [
        StepMessage(rows[:1], False, False, False, (), 2),
        StepMessage(rows[1:], False, False, False, (), 2),
    ]
    totals = exchanged(*each, most_lanes=2)
    assert totals.lanes == [LaneRow(n, (Term(0.5 * n, 1.0), Term(-2.0, float(n)))) for n in range(3)]
    assert (totals.loss_sum, totals.weight) == (1.5, 3.0)


@pytest.mark.parametrize("lane", [math.nan, 7.0])
def test_a_message_of_other_lanes_than_those_of_the_step_is_an_error(lane):
    """A row whose lane came as NaN was dropped: nothing was updated, and the run ended with exit code 0."""
    world = Ranks()
    waits = [
        message([LaneRow(number, (Term(1.0, 2.0),))]).start_exchange(world, 1, range(2)) for number in (0, 1)
    ]
    world.told[1][0] = lane
    with pytest.raises(WorldError, match=r"told of the lanes \[0.*\], and the step has \[0, 1\]"):
        waits[1]()


@pytest.mark.parametrize("on_device", [False, True])
def test_each_process_tells_the_loss_of_all_samples(on_device):
    world, waits = Ranks(), []
    for rank, loss in enumerate((3.0, math.nan)):
        changes = torch.zeros(0, dtype=torch.float64) if on_device else []
        common = torch.tensor(loss) if on_device else loss
        row = LaneRow(rank, (Term(1.0, 2.0),))
        one = StepMessage([row], False, False, False, changes, computed_seconds=0.5, common_loss=common)
        if on_device:
            world.told.append(one._numbers_on(CPU, 1))
            continue
        waits.append(one.start_exchange(world, 1, range(2)))
    if on_device:
        waits = [one.start_exchange(world, 1, range(2))]
        world.told.pop()
    totals = waits[-1]()
    assert totals.common_losses == pytest.approx([3.0, math.nan], nan_ok=True)
    assert totals.computed_seconds == [0.5, 0.5]
