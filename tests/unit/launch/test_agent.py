"""Which failure the agent of a host names."""

import signal

import pytest

from lanewise.launch import JobFiles
from lanewise.launch.agent import _first_failure
from lanewise.processes.watch.channel import failure_of
from lanewise.processes.watch.failure import ERROR_FILE_VARIABLE, SILENCE, Failure, record_failure
from lanewise.processes.watch.store import StoreLostError
from tests.unit.processes.watch.store import make_beat, make_channels

RESET = Failure.of(RuntimeError("Connection reset by peer"), rank=1)


@pytest.fixture
def files(tmp_path):
    return JobFiles(tmp_path / "job")


@pytest.fixture
def recorded(files, monkeypatch):
    """Rank 1 could not tell the store why it ends, and left it in its file."""
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(files.error(1)))
    record_failure(RESET)
    return files


class Ended:
    """A worker that has ended; if it is late, `poll` has not learned of it yet."""

    def __init__(self, code, *, is_late=False):
        self.code, self.is_late = code, is_late

    def poll(self):
        return None if self.is_late else self.code

    def wait(self, seconds):
        return self.code


class Lost:
    """A channel whose store is lost."""

    def first(self):
        raise StoreLostError("the store is lost.", has_ended=True)


def test_what_a_rank_could_tell_nobody_else_is_read_from_its_file(recorded):
    zero, one = make_channels(2)
    assert _first_failure(one, {1: Ended(1)}, recorded) == RESET
    assert zero.first() == RESET


def test_it_counts_more_than_that_others_heard_nothing_of_the_rank(recorded):
    zero, one = make_channels(2)
    zero.report(failure_of(1, make_beat(), SILENCE, "rank 1 fell silent."))
    assert _first_failure(one, {1: Ended(1)}, recorded) == RESET


def test_it_is_known_where_the_store_is_lost_to_the_agent_too(recorded):
    assert _first_failure(Lost(), {1: Ended(1)}, recorded) == RESET


def test_the_word_in_the_store_counts_more(recorded):
    zero, one = make_channels(2)
    first = zero.report(failure_of(0, make_beat(), "ValueError", "boom"))
    assert _first_failure(one, {1: Ended(1)}, recorded) == first


@pytest.mark.parametrize("written", [None, b"", b"{}", b'{"message": "of other code"}', b'{"failure": {}}'])
def test_of_a_rank_that_left_nothing_the_exit_code_is_known(files, written):
    if written is not None:
        files.error(1).write_bytes(written)
    _, one = make_channels(2)
    assert _first_failure(one, {1: Ended(3)}, files).exit_code == 3


def test_a_rank_that_a_signal_ended_comes_before_those_that_missed_it(recorded):
    zero, _ = make_channels(2)
    assert _first_failure(zero, {0: Ended(-signal.SIGKILL), 1: Ended(1)}, recorded).kind == "SIGKILL"


def test_the_exit_code_of_a_rank_is_waited_for_whose_end_another_has_seen(files):
    """The other sees that its first thread has ended; the code is told after the last one has."""
    zero, _ = make_channels(2)
    zero.report(failure_of(1, make_beat(), SILENCE, "rank 1, which has ended, reported no error."))
    failure = _first_failure(zero, {0: Ended(1), 1: Ended(-signal.SIGKILL, is_late=True)}, files)
    assert failure.kind == "SIGKILL"
