"""Who failed first, who is silent, and what the others are told."""

import dataclasses
import os
import subprocess

import pytest

from lanewise.processes.watch import channel as module
from lanewise.processes.watch.channel import failure_of, named_ranks, silent, until
from lanewise.processes.watch.failure import Failure
from lanewise.processes.watch.heartbeat import DONE
from lanewise.processes.watch.process import ENDED, process_table, state_of
from tests.unit.processes.watch.store import make_beat, make_channels


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_FOR_OTHERS", 0.4)


def failure(rank: int, text: str = "boom") -> Failure:
    return failure_of(rank, make_beat(), "ValueError", text)


def test_the_first_to_take_a_number_failed_first_for_all():
    zero, one, two = make_channels(3)
    assert zero.first() is None
    assert one.report(failure(1)) == failure(1)
    assert zero.first() == two.first() == failure(1)
    assert two.report(failure(2, "later")) == failure(1)


def test_a_lost_connection_waits_for_the_word_of_the_one_that_failed():
    zero, one = make_channels(2)
    one.report(failure(1))
    assert zero.report(failure(0, "connection reset"), is_consequence=True) == failure(1)


def test_a_rank_that_ended_without_a_word_is_named_with_its_last_phase():
    zero, one, _ = make_channels(3)
    zero.beat(make_beat(pid=os.getpid()))
    one.beat(make_beat())
    first = zero.report(failure(0, "connection reset"), is_consequence=True)
    assert first.rank == 1
    assert first.note == ("forward", 17, 3)
    assert first.text.startswith("rank 1 on gpu-a (process 4194305), which has ended, reported no error.")
    assert "forward of step 18, lane 3" in first.text
    assert one.first() == first


def test_a_rank_of_another_host_that_says_nothing_more_is_named():
    zero, one = make_channels(2)
    one.beat(make_beat(table="of another host"))
    first = zero.report(failure(0, "connection reset"), is_consequence=True)
    assert first.rank == 1
    assert "which fell silent, with its host or the way to it" in first.text


def test_a_rank_that_left_while_others_wait_for_it_is_named():
    """The script of an own loop may end early on one rank, by sys.exit for instance."""
    zero, one = make_channels(2)
    one.beat(make_beat(note=(DONE, 17, None)))
    first = zero.report(failure(0, "connection reset"), is_consequence=True)
    assert first.text == "rank 1 on gpu-a (process 4194305) left after step 18, while others wait for it."


def test_something_else_in_the_store_is_no_heartbeat():
    zero, one = make_channels(2)
    zero.beat(make_beat())
    one.store.set("1/beat/1", '{"number": 1}')
    assert zero.beats() == {0: make_beat()}


def test_something_else_in_the_store_is_no_failure():
    zero, one = make_channels(2)
    one.store.set("1/failure/1", '{"exit_code": 0}')
    assert zero.first() is None


def test_a_lost_connection_without_any_cause_is_the_failure_itself():
    zero, _ = make_channels(2)
    assert zero.report(failure(0, "connection reset"), is_consequence=True).text == "connection reset"


def test_only_ranks_whose_number_stands_still_are_silent():
    before = {0: make_beat(1), 1: make_beat(7), 2: make_beat(3)}
    assert silent(before, {0: make_beat(2), 1: make_beat(7)}) == {1: make_beat(7)}


def test_heartbeats_are_read_as_they_were_written_and_those_of_done_ranks_are_left_out():
    zero, one, two = make_channels(3)
    zero.beat(make_beat(4))
    two.beat(make_beat(note=(DONE, 17, None)))
    assert one.beats() == {0: make_beat(4)}


def test_one_process_of_each_place_takes_a_duty():
    first = [channel.is_first("show", rank // 2) for rank, channel in enumerate(make_channels(4))]
    assert first == [True, False, True, False]


def test_evidence_is_what_the_ranks_answered_in_time():
    zero, one, _ = make_channels(3)
    assert not one.is_asked()
    assert zero.ask()
    assert not one.ask()
    assert one.is_asked()
    one.answer({"stack": "main"})
    assert zero.evidence([1, 2]) == {1: {"stack": "main"}}


def test_the_same_failure_at_the_same_step_in_the_next_start_ends_the_run_for_good():
    zero, one = make_channels(2)
    one.report(failure(1))
    assert zero.over() is None
    zero.start = one.start = 2
    assert zero.first() is None
    one.report(failure(1))
    assert zero.over() == failure(1)


def test_a_mistake_ends_the_run_for_good_at_once():
    zero, one = make_channels(2)
    mistake = dataclasses.replace(failure(1), exit_code=2)
    one.report(mistake)
    assert zero.over() == mistake


def test_a_neighbour_that_does_not_end_is_killed(monkeypatch):
    zero, one = make_channels(2)
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were a child of itself, too
    with subprocess.Popen(["sleep", "600"]) as neighbour:
        zero.beat(make_beat(pid=os.getpid(), table=process_table()))
        one.beat(make_beat(pid=neighbour.pid, table=process_table()))
        zero.end_neighbours()
        assert neighbour.wait(60) == -9


def test_what_a_killed_neighbour_has_started_ends_with_it(monkeypatch):
    zero, one = make_channels(2)
    monkeypatch.setattr(os, "getppid", os.getpid)
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as neighbour:
        assert neighbour.stdout is not None
        child = int(neighbour.stdout.readline())
        one.beat(make_beat(pid=neighbour.pid, table=process_table()))
        zero.end_neighbours()
    assert until(lambda: state_of(child, process_table()) == ENDED, 5)


def test_a_process_of_another_host_is_not_killed_for_its_number(monkeypatch):
    zero, one = make_channels(2)
    monkeypatch.setattr(os, "getppid", os.getpid)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        one.beat(make_beat(pid=stranger.pid, table="of another host"))
        zero.end_neighbours()
        assert stranger.poll() is None
        stranger.kill()


def test_a_process_of_another_parent_is_not_killed_whoever_says_that_it_is_a_rank():
    """Whoever reaches the store can write a heartbeat there."""
    zero, one = make_channels(2)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        one.beat(make_beat(pid=stranger.pid, table=process_table()))  # a child, where ranks are siblings
        zero.end_neighbours()
        assert stranger.poll() is None
        stranger.kill()


def test_ranks_are_named_in_words():
    assert (named_ranks([1]), named_ranks([0, 2])) == ("rank 1", "ranks 0, 2")
