"""Which lines of a run are jumps of the loss."""

import math
import random

import pytest

from lanewise.runs.jumps import JUMP, Jumps


def line(loss, step=1):
    return {"step": step, "train/loss": loss, "largest_loss": {"step": step}}


def found(losses) -> list[int]:
    jumps = Jumps()
    return [number for number, loss in enumerate(losses) if jumps.find(line(loss)) is not None]


def noisy(middle=2.0, width=0.1, number=60):
    draw = random.Random(0)
    return [draw.gauss(middle, width) for _ in range(number)]


def test_a_loss_far_above_those_before_is_a_jump_and_tells_their_median():
    jumps = Jumps()
    assert {jumps.find(line(loss)) for loss in noisy()} == {None}
    assert jumps.find(line(5.0, step=61)) == pytest.approx(2.0, abs=0.05)
    assert jumps.steps == [61]


def test_of_lines_that_stay_high_the_first_is_a_jump():
    assert found([*noisy(), 5.0, 6.0, 7.0, *noisy(number=5), 30.0]) == [60, 68]


@pytest.mark.parametrize(
    "losses",
    [
        [*noisy(number=19), 9.0],
        [3.0 * 0.97**step for step in range(300)],
        [1.0] * 50 + [1.05],
        [*noisy()[:30], math.nan, math.inf],
        [1e-3 * step for step in range(300)],
        noisy(width=0.5, number=2000),
        [2.0 if step % 21 else 6.0 for step in range(1, 400)],
    ],
    ids=["few lines", "falls", "equal ones", "no numbers", "rises slowly", "noise", "again and again"],
)
def test_what_is_no_jump(losses):
    assert found(losses) in ([], [20])  # a peak that comes again and again is one only the first time


def test_lines_of_other_kinds_do_not_count():
    jumps = Jumps()
    others = ({"train/loss": 90.0}, {**line(1.0), "event": JUMP, "train/loss": "x"}, {"held_out/loss": 90.0})
    for loss in noisy():
        assert [jumps.find(columns) for columns in (line(loss), *others, line(10**400))] == [None] * 5
    assert jumps.find(line(5.0)) is not None
