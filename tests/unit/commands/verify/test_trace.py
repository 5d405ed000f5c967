"""Which steps verify takes."""

import pytest

from lanewise.commands.verify.trace import choose_steps, steps_of
from lanewise.data import StreamCut, StreamLoader, StreamReader
from lanewise.lanes import Schedule

SCHEDULE = Schedule(num_samples=77, global_batch_size=8, micro_batch_size=2)
"""Ten steps an epoch, the last one partial."""


@pytest.mark.parametrize(
    ("num_steps", "last_step", "steps"),
    [
        (1, 20, [9]),
        (2, 20, [9, 10]),
        (3, 20, [0, 9, 10]),
        (4, 20, [0, 1, 9, 10]),
        (4, 10, [0, 1, 2, 9]),
        (4, 11, [0, 1, 9, 10]),
        (12, 20, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (12, 11, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (2, 2, [0, 9]),
        (1, 1, [9]),
    ],
)
def test_the_steps_on_both_sides_of_the_first_epochs_end_are_taken(num_steps, last_step, steps):
    """An augmentation cache was verified once where an epoch has more steps than are taken."""
    assert choose_steps(SCHEDULE, num_steps, last_step) == steps


@pytest.mark.parametrize(("num_steps", "last_step", "steps"), [(3, None, [0, 1, 2]), (3, 2, [0, 1])])
def test_of_a_stream_the_first_steps_are_taken(num_steps, last_step, steps):
    reader = StreamReader(range(9), list, 0, StreamCut.of(1, 2, 0), range(1))
    assert steps_of(StreamLoader(reader, lambda value: [value]), num_steps, last_step) == steps


def test_epochs_of_one_step():
    schedule = Schedule(num_samples=5, global_batch_size=8, micro_batch_size=2)
    assert choose_steps(schedule, 4, 6) == [0, 1, 2, 3]
    assert choose_steps(schedule, 4, 1) == [0]
