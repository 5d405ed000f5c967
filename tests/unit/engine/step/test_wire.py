"""Messages arrive as they were sent: whoever carries which lanes, on the CPU and on an accelerator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lanewise.engine.step.totals import StepTotals, in_rank_order, merged_by
from lanewise.engine.step.wire import LaneRow, Term, Votes, start_exchange

CPU = torch.device("cpu")


class Ranks:
    """Processes of which each tells its message before one of them hears all."""

    def __init__(self) -> None:
        self.device = CPU
        self.sent: list[torch.Tensor] = []

    def start_all_gather(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.sent.append(numbers)
        return lambda: torch.stack(self.sent)


def exchanged(*each: dict[str, Any], most_lanes: int = 1, totals: type = StepTotals) -> Any:
    """Return the totals of what each process sends."""
    world = Ranks()
    num_terms = max((len(row.terms) for sent in each for row in sent.get("lanes", ())), default=1)
    for sent in each:
        others = {name: numbers for name, numbers in sent.items() if name != "lanes"}
        wait = start_exchange(sent.get("lanes", ()), others, world, most_lanes, num_terms)
    return totals.of(*wait())


@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_any_process_may_carry_any_lanes(carriers, absent):
    rows = [LaneRow(lane, (Term(0.5 * lane, float(lane), 3.0),)) for lane in range(8)]
    present = [row for row in rows if not absent[row.lane]]
    each = [{"lanes": [row for row in present if carriers[row.lane] == rank]} for rank in range(3)]
    totals = exchanged(*each, most_lanes=8)
    assert totals.lanes == [LaneRow(row.lane, (Term(1.5 * row.lane, row.weight),)) for row in present]
    assert totals.loss_sum == math.fsum(1.5 * row.lane for row in present)
    assert totals.weight == math.fsum(row.weight for row in present)


def test_a_row_may_have_several_terms():
    """As a loss that reports metrics needs them."""
    rows = [LaneRow(lane, (Term(0.5 * lane, 1.0), Term(-1.0, float(lane), 2.0))) for lane in range(3)]
    totals = exchanged({"lanes": rows[:1]}, {"lanes": rows[1:]}, most_lanes=2)
    assert totals.lanes == [LaneRow(n, (Term(0.5 * n, 1.0), Term(-2.0, float(n)))) for n in range(3)]
    assert (totals.loss_sum, totals.weight) == (1.5, 3.0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("vote", Votes._fields)
def test_one_vote_is_enough(vote, rank):
    each = [{"votes": Votes()}, {"votes": Votes()}]
    each[rank] = {"votes": Votes(**{vote: True})}
    assert exchanged(*each).votes == Votes(**{vote: True})


def test_each_field_is_merged_by_its_rule_in_the_order_of_ranks():
    names = "buffer_changes", "computed_seconds", "common_loss", "to_source"
    totals = exchanged(
        dict(zip(names, ([0.0, 2.0], [0.5], [3.0], [2, 1]), strict=True)),
        dict(zip(names, ([1.0, 0.0], [0.25], [math.nan], [0, -1]), strict=True)),
    )
    assert (totals.buffer_changes, totals.computed_seconds) == ([1.0, 2.0], [0.5, 0.25])
    assert totals.common_loss == pytest.approx([3.0, math.nan], nan_ok=True)
    assert totals.to_source == [2, 1, 0, -1]


def test_a_new_field_is_one_line():
    """It was declared in four modules, and decoded by its place."""
    line = ("queued", Sequence[float], merged_by(in_rank_order, ()))
    totals = make_dataclass("Totals", [line], bases=(StepTotals,))
    merged = exchanged(
        {"queued": [3.0, 1.0], "computed_seconds": [0.5]},
        {"queued": [2.0, 4.0], "computed_seconds": [0.25]},
        totals=totals,
    )
    assert (merged.queued, merged.computed_seconds) == ([3.0, 1.0, 2.0, 4.0], [0.5, 0.25])


@pytest.mark.parametrize("common_loss", [[], [3.0]])
@pytest.mark.parametrize("seconds", [[], [math.nan]])
def test_an_accelerator_sends_the_same_without_reading_its_numbers(seconds, common_loss):
    rows = [
        LaneRow(4, (Term(0.25, 8.0, 8.0), Term(0.5, 3.0))),
        LaneRow(5, (Term(0.0, 0.0), Term(-0.75, 2.0, 2.0))),
    ]
    there = [
        LaneRow(4, (Term(torch.tensor(0.25), 8.0, 8.0), Term(torch.tensor(0.5), 3.0))),
        LaneRow(5, (Term(0.0, 0.0), Term(torch.tensor(-0.75), torch.tensor(2), 2.0))),
    ]
    world, device_world = Ranks(), Ranks()
    known = {
        "votes": Votes(save=True),
        "buffer_changes": [1.0, 0.0],
        "seconds": seconds,
        "common_loss": common_loss,
    }
    start_exchange(rows, known, world, 3, 2)
    late = {
        **known,
        "buffer_changes": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "common_loss": torch.tensor(common_loss),
    }
    start_exchange(there, late, device_world, 3, 2)
    assert torch.equal(world.sent[0].nan_to_num(-7), device_world.sent[0].nan_to_num(-7))


@pytest.mark.parametrize("lane", [math.nan, -1.0])
def test_a_row_whose_lane_was_lost_is_missing(lane):
    world = Ranks()
    waits = [start_exchange([LaneRow(number, (Term(1.0, 2.0),))], {}, world, 1, 1) for number in (0, 1)]
    world.sent[1][0] = lane
    assert [row.lane for row in waits[1]()[0]] == [0]
