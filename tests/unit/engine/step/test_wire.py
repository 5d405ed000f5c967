"""Messages arrive as they were sent: whoever carries which lanes, on the CPU and on an accelerator."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.wire import LaneRow, Report, Term, start_exchange

CPU = torch.device("cpu")
NO_VOTES = (False, False, False)


class Ranks:
    """Processes of which each tells its message before one of them hears all."""

    def __init__(self) -> None:
        self.device = CPU
        self.sent: list[torch.Tensor] = []

    def start_all_gather(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.sent.append(numbers)
        return lambda: torch.stack(self.sent)


def exchanged(each: Sequence[Report], most_lanes: int) -> list[Report]:
    world = Ranks()
    num_terms = max((len(row.terms) for told in each for row in told.lanes), default=1)
    *_, wait = [start_exchange(told, world, most_lanes, num_terms) for told in each]
    return wait()


def told(lanes: Sequence[LaneRow], **more: object) -> Report:
    return Report(lanes, NO_VOTES, [])._replace(**more)


def on_device(number: float | None) -> torch.Tensor | None:
    """Return a number as an accelerator has it, which the host has not read."""
    return None if number is None else torch.tensor(number)


@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_any_process_may_carry_any_lanes(carriers, absent):
    rows = [LaneRow(lane, (Term(0.5 * lane, float(lane), 3.0),)) for lane in range(8)]
    present = [row for row in rows if not absent[row.lane]]
    each = [told([row for row in present if carriers[row.lane] == rank]) for rank in range(3)]
    totals = StepTotals.of(exchanged(each, most_lanes=8))
    assert totals.lanes == [LaneRow(row.lane, (Term(1.5 * row.lane, row.weight),)) for row in present]
    assert totals.loss_sum == math.fsum(1.5 * row.lane for row in present)
    assert totals.weight == math.fsum(row.weight for row in present)


def test_a_row_may_have_several_terms():
    """As a loss that reports metrics needs them."""
    rows = [LaneRow(lane, (Term(0.5 * lane, 1.0), Term(-1.0, float(lane), 2.0))) for lane in range(3)]
    totals = StepTotals.of(exchanged([told(rows[:1]), told(rows[1:])], most_lanes=2))
    assert totals.lanes == [LaneRow(n, (Term(0.5 * n, 1.0), Term(-2.0, float(n)))) for n in range(3)]
    assert (totals.loss_sum, totals.weight) == (1.5, 3.0)


@pytest.mark.parametrize("upcoming", [None, [3, 0]])
@pytest.mark.parametrize("common_loss", [None, 0.75])
@pytest.mark.parametrize("seconds", [None, 0.5])
def test_whatever_is_told_arrives(seconds, common_loss, upcoming):
    row = LaneRow(1, (Term(2.0, 3.0),))
    one = Report([row], (True, False, True), [1.0, 0.0], seconds, common_loss, upcoming)
    other = one._replace(lanes=[], votes=(False, True, False), upcoming=upcoming and [1])
    assert exchanged([one, other], most_lanes=2) == [one, other]


@pytest.mark.parametrize("common_loss", [None, 3.0])
@pytest.mark.parametrize("seconds", [None, math.nan])
def test_an_accelerator_tells_the_same_without_reading_its_numbers(seconds, common_loss):
    rows = [
        LaneRow(4, (Term(0.25, 8.0, 8.0), Term(0.5, 3.0))),
        LaneRow(5, (Term(0.0, 0.0), Term(-0.75, 2.0, 2.0))),
    ]
    there = [
        LaneRow(4, (Term(torch.tensor(0.25), 8.0, 8.0), Term(torch.tensor(0.5), 3.0))),
        LaneRow(5, (Term(0.0, 0.0), Term(torch.tensor(-0.75), torch.tensor(2), 2.0))),
    ]
    world, device_world = Ranks(), Ranks()
    known = Report(rows, (True, False, False), [1.0, 0.0], seconds, common_loss)
    start_exchange(known, world, 3, 2)
    changes = torch.tensor([1.0, 0.0], dtype=torch.float64)
    late = known._replace(lanes=there, buffer_changes=changes, common_loss=on_device(common_loss))
    start_exchange(late, device_world, 3, 2)
    assert torch.equal(world.sent[0].nan_to_num(-7), device_world.sent[0].nan_to_num(-7))


@pytest.mark.parametrize("lane", [math.nan, -1.0])
def test_a_row_whose_lane_was_lost_is_missing(lane):
    world = Ranks()
    waits = [start_exchange(told([LaneRow(number, (Term(1.0, 2.0),))]), world, 1, 1) for number in (0, 1)]
    world.sent[1][0] = lane
    assert [row.lane for of_rank in waits[1]() for row in of_rank.lanes] == [0]
