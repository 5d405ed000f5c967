"""Which lines of a run are jumps of the loss."""

import math
import random

import pytest

from lanewise.runs.jumps import JUMP, Jumps


def found(losses) -> list[int]:
    jumps = Jumps()
    return [number for number, loss in enumerate(losses) if jumps.find(loss) is not None]


def noisy(middle=2.0, width=0.1, number=60):
    draw = random.Random(0)
    return [draw.gauss(middle, width) for _ in range(number)]


def test_a_loss_far_above_those_before_is_a_jump_and_tells_their_median():
    jumps = Jumps()
    assert {jumps.find(loss) for loss in noisy()} == {None}
    assert jumps.find(5.0) == pytest.approx(2.0, abs=0.05)


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
        [2.0 if step % 40 else 6.0 for step in range(1, 400)],
    ],
    ids=["few lines", "falls", "equal ones", "no numbers", "rises slowly", "noise", "again and again"],
)
def test_what_is_no_jump(losses):
    assert found(losses) in ([], [39])  # a peak that comes again and again is one only the first time


def test_lines_that_are_there_already_count_whatever_they_hold():
    """A run that goes on finds the same jumps as one that nobody stopped."""
    jumps = Jumps()
    for loss in noisy():
        jumps.note({"step": 1, "train/loss": loss})
    largest = {"loss": 7.0, "step": 31, "lane": 0, "samples": []}
    for line in ({"train/loss": "x"}, {"train/loss": 10**400}, {"event": JUMP}, {"event": "other"}):
        jumps.note(line)
    jumps.note({"event": JUMP, "step": 40, "largest_loss": largest})
    assert jumps.steps == [31]
    assert jumps.find(5.0) is not None
