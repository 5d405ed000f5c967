"""Where in its run a step is, and who asked for the length of the run."""

from contextlib import suppress

from lanewise.lanes import PROGRESS, RunLength, StepProgress, own_progress


def test_only_what_depends_on_the_length_asks_for_it():
    progress = StepProgress(3, 1, RunLength(12))
    assert (progress.number, progress.epoch, progress.length.is_asked) == (3, 1, False)
    assert progress.fraction == 0.25
    assert progress.length.is_asked


def test_a_stream_that_is_read_to_its_end_has_no_length():
    progress = StepProgress(3, 1, RunLength())
    assert (progress.num_steps, progress.fraction) == (None, None)


def test_it_is_forgotten_where_a_run_ends_with_an_error():
    """Whatever ran next in a notebook saw that of the run that had failed."""
    with suppress(KeyError), own_progress():
        PROGRESS.set((3, 1, RunLength(12)))
        raise KeyError
    assert PROGRESS.get() is None
