"""Rows and totals of the lanes of a process alone; tests/distributed/engine/test_state.py has several."""

import pytest
import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.joining import Joining
from lanewise.engine.step.parts import NO_PARTS, lane_parts
from lanewise.engine.step.wire import LaneRow
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.world.world import LocalWorld
from lanewise.reduce.single import SingleReducer

WORLD = LocalWorld(torch.device("cpu"))


def new(num_lanes: int, *, is_on: bool = False) -> Joining:
    reducer = SingleReducer(nn.Linear(1, 1), num_lanes, "exact")
    return Joining(reducer, WORLD, Placement.of(num_lanes, WORLD), is_on=is_on)


def step(joining, parts, is_first=True):
    """Join what lanes give, each of three samples."""
    present = range(len(parts))
    for lane, of_lane in enumerate(parts):
        turn = LaneTurn(0, 0, lane, range(3), present, is_last=lane == len(parts) - 1)
        joining.add(LaneBatch(turn, (0, 1, 2), None, 0 if of_lane is None else 3), of_lane)
    if is_first:
        joining.agree([joining.offer()], 0)
    rows = [LaneRow(lane, joining.terms(lane)) for lane in range(len(parts))]
    return joining.join(rows, LaneBatch(turn, (), None, 3))


def given(lane: int):
    rows = {"keys": torch.full((lane, 2), float(lane)), "ids": (torch.arange(lane),)}
    total = {
        "count": torch.tensor([lane > 0, True]),
        "half": torch.full((), 0.1 + lane, dtype=torch.bfloat16),
        "wide": {"x": torch.full((2,), 2.0**-40).double()},
    }
    return lane_parts(rows, total, "the loss")


def test_rows_are_in_lane_order_and_totals_keep_what_16_bits_would_lose():
    joining = new(4)
    for is_first in (True, False):
        joined = step(joining, [given(0), None, given(2), given(3)], is_first)
        assert joined.num_samples == 9
        assert joined.gathered["keys"].tolist() == [[2.0, 2.0]] * 2 + [[3.0, 3.0]] * 3
        assert joined.gathered["ids"][0].tolist() == [0, 1, 0, 1, 2]
        assert joined.totals["count"].tolist() == [2, 3]
        assert joined.totals["count"].dtype == torch.int64
        half = [torch.tensor(0.1 + lane).bfloat16().float() for lane in (0, 2, 3)]
        assert joined.totals["half"] == (half[0] + half[1] + half[2])
        assert joined.totals["wide"]["x"].tolist() == [3 * 2.0**-40] * 2


def test_lanes_give_the_same_names_in_any_order():
    """Rows of one name once became those of another."""
    one, two = torch.ones(1, 2), 2 * torch.ones(1, 2)
    parts = [lane_parts(rows, None, "") for rows in ({"a": one, "b": two}, {"b": two, "a": one})]
    assert step(new(2), parts).gathered["a"].tolist() == [[1.0, 1.0]] * 2


def test_what_a_lane_gave_may_change_afterwards():
    joining = new(1)
    parts = lane_parts({"keys": torch.ones(2, 2)}, {"n": torch.ones(2)}, "")
    turn = LaneTurn(0, 0, 0, range(2), range(1), is_last=True)
    batch = LaneBatch(turn, (0, 1), None, 2)
    joining.add(batch, parts)
    parts.gather["keys"].zero_()
    parts.total["n"].zero_()
    joining.agree([joining.offer()], 0)
    joined = joining.join([LaneRow(0, joining.terms(0))], batch)
    assert (joined.gathered["keys"].sum(), joined.totals["n"].sum()) == (4, 2)


def test_a_step_in_which_no_lane_gives_anything_has_no_rows_and_zeros():
    joining = new(2)
    step(joining, [given(1), given(2)])
    joined = step(joining, [None, None], is_first=False)
    assert joined.gathered["keys"].shape == (0, 2)
    assert joined.totals["count"].tolist() == [0, 0]


def test_nothing_travels_where_nothing_is_given():
    joining = new(2)
    turn = LaneTurn(0, 0, 0, range(2), range(1), is_last=True)
    joining.add(LaneBatch(turn, (0, 1), None, 2), NO_PARTS)
    joining.agree([joining.offer()], 0)
    assert (joining.is_on, joining.num_terms) == (False, 0)


def test_samples_are_counted_for_a_task_that_gives_nothing():
    assert step(new(3, is_on=True), [NO_PARTS, NO_PARTS, None]).num_samples == 6


def test_lanes_that_differ_are_an_error_in_the_first_step_and_later():
    with pytest.raises(
        TaskError, match=r"step 1 give different.*\n  lane 0: gather ids.*\n  lane 1: nothing"
    ):
        step(new(2), [given(1), NO_PARTS])
    joining = new(2)
    step(joining, [given(1), given(2)])
    other = lane_parts({"keys": torch.ones(1, 3)}, None, "")
    with pytest.raises(
        TaskError, match=r"of the first step: gather ids.*\n  lane 1: gather keys: \[rows, 3\]"
    ):
        step(joining, [given(1), other], is_first=False)


def test_what_comes_after_the_first_step_is_an_error_that_the_message_tells_all():
    joining = new(1)
    turn = LaneTurn(0, 0, 0, range(2), range(1), is_last=True)
    joining.add(LaneBatch(turn, (0, 1), None, 2), NO_PARTS)
    joining.agree([joining.offer()], 0)
    joining.add(LaneBatch(turn, (0, 1), None, 2), NO_PARTS)
    assert not joining.mismatches
    joining.add(LaneBatch(turn, (0, 1), None, 2), given(1))
    assert not joining.is_on
    with pytest.raises(TaskError, match=r"of the first step: nothing\n  lane 0: gather ids"):
        joining.refuse_mismatches([joining.mismatches], 3)
