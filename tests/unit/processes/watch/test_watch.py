"""A process that watches itself."""

import itertools
import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lanewise.config import DistributedConfig
from lanewise.errors import LostRankError
from lanewise.processes.watch import watch as module
from lanewise.processes.watch.heartbeat import CALLBACK, DATA, DONE, OWN_CODE, SAVE, Heartbeat
from lanewise.processes.watch.process import ENDED, process_table, state_of
from lanewise.processes.watch.watch import SAVING, Watch
from lanewise.processes.world.environment import Environment
from tests.patience import patient
from tests.unit.processes.watch.store import make_beat, make_channels


class EndedError(Exception):
    """What stands for the end of a process."""


@pytest.fixture
def beating(monkeypatch):
    beating = Heartbeat()
    monkeypatch.setattr(module, "heartbeat", beating)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_CHECKS", 0.02)
    monkeypatch.setattr(module, "is_debugged", lambda: False)
    return beating


@pytest.fixture
def watch(beating, monkeypatch):
    """A watch that notes the failure instead of ending this process."""
    watch = Watch()
    ended = []

    def end(first, error=None):
        ended.append(first)
        watch._closed.set()
        raise EndedError

    monkeypatch.setattr(watch, "_end", end)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    watch.ended = ended
    yield watch
    watch.close()


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + patient(seconds)
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_a_process_without_progress_ends_with_its_phase_and_its_stack(watch, beating):
    watch.begin(DistributedConfig(stall_seconds=0.1, start_seconds=None))
    beating.note = ("forward", 17, 3)
    beating.has_trained = True
    assert wait_for(lambda: watch.ended)
    assert watch.ended[0].note == ("forward", 17, 3)
    assert "distributed.stall_seconds=0.1" in watch.ended[0].text
    assert "wait_for" in watch.ended[0].text


def test_before_the_end_of_the_first_step_the_other_limit_holds(watch, beating):
    watch.begin(DistributedConfig(stall_seconds=None, start_seconds=0.1))
    assert wait_for(lambda: watch.ended)
    assert "distributed.start_seconds=0.1" in watch.ended[0].text


def test_a_note_that_says_the_same_again_and_a_saved_file_are_progress(watch, beating):
    limit = patient(0.5)
    watch.begin(DistributedConfig(stall_seconds=limit, start_seconds=None))
    beating.has_trained = True
    end = time.monotonic() + 1.5 * limit
    for number in itertools.count():
        if number % 2:
            beating.note = ("evaluation", int("17"), None)
        else:
            beating.num_pieces += 1
        time.sleep(0.02)
        if time.monotonic() > end:
            break
    assert not watch.ended


@pytest.mark.parametrize("phase", [OWN_CODE, DONE])
def test_what_runs_between_the_steps_of_an_own_loop_may_take_any_time(watch, beating, phase):
    watch.begin(DistributedConfig(stall_seconds=0.1, start_seconds=0.1))
    beating.note = (phase, 17, None)
    assert not wait_for(lambda: watch.ended, 0.5)


@pytest.mark.parametrize("phase", [DATA, CALLBACK])
def test_without_limits_a_phase_may_take_any_time(watch, beating, phase):
    watch.begin(DistributedConfig(stall_seconds=None, start_seconds=None))
    beating.note = (phase, 17, None)
    assert not wait_for(lambda: watch.ended, 0.5)


def test_a_second_run_of_a_process_begins_anew(watch, beating):
    beating.note, beating.has_trained = ("done", 99, None), True
    watch.begin(DistributedConfig(stall_seconds=None, start_seconds=None))
    assert beating.note == ("start", None, None)
    assert not beating.has_trained


def test_time_in_a_debugger_is_not_counted(watch, beating, monkeypatch):
    monkeypatch.setattr(module, "is_debugged", lambda: True)
    watch.begin(DistributedConfig(stall_seconds=0.05, start_seconds=0.05))
    assert not wait_for(lambda: watch.ended, 0.5)


def test_what_a_process_has_started_ends_with_it_after_an_error():
    """Under torchrun each rank leads a session."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.write(write, str(subprocess.Popen(["sleep", "600"]).pid).encode())
        Watch().fail(ValueError("boom"))
    child = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert wait_for(lambda: state_of(child, process_table()) == ENDED)


def test_one_that_says_nothing_for_a_moment_is_not_silent(beating, monkeypatch):
    """It may keep the interpreter to itself, in native code, and make progress nevertheless."""
    zero, one = make_channels(2)
    monkeypatch.setattr(module, "gather_evidence", lambda _: {})
    watch = Watch(cast("Any", SimpleNamespace(channel=zero, environment=Environment())))
    watch._limits = {"stall_seconds": 10.0, "start_seconds": 10.0}
    ended: list[object] = []
    monkeypatch.setattr(watch, "_end", ended.append)
    beating.note = ("communication", 17, None)
    for seconds, number in [(0.0, 1), (4.0, 2), (6.0, 3), (8.0, 4), (11.0, 4), (12.0, 4)]:
        one.beat(make_beat(number, note=("forward", 17, 3), age_seconds=1.0, limit_seconds=10.0))
        monkeypatch.setattr(watch, "_measure_age", lambda: None)
        watch._age_seconds = seconds
        watch._check()
    assert ended == []


@pytest.mark.parametrize("note", [(SAVE, 17, None), (DONE, 17, None), (OWN_CODE, 17, None)])
def test_rank_0_hears_of_a_rank_that_ended_while_it_waits_for_a_checkpoint_or_at_the_end(
    beating, monkeypatch, note
):
    """It waited for the part of a killed process for half an hour, and named nobody."""
    zero, one = make_channels(2)
    watch = Watch(cast("Any", SimpleNamespace(channel=zero, environment=Environment())))
    watch._limits = {"stall_seconds": 300.0, "start_seconds": 300.0}
    ended: list[Any] = []
    monkeypatch.setattr(watch, "_end", ended.append)
    one.beat(make_beat())  # of a process that does not exist
    beating.note = note
    watch._check()
    if note[0] == OWN_CODE:
        assert ended == []
        return
    (failure,) = ended
    assert failure.rank == 1
    assert "which has ended, reported no error" in failure.text
    assert one.first() == failure  # others hear of it, too


def test_a_process_that_fails_waits_for_its_save_but_not_after_the_failure_of_another(beating, monkeypatch):
    """An error right after a save lost the checkpoint on several processes, and kept it on one."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for error, waits in ((ValueError("of the user"), True), (LostRankError("a rank is lost"), False)):
        watch, seen, writes = Watch(), [], threading.Event()
        thread = threading.Thread(target=writes.wait, name=SAVING, daemon=True)
        monkeypatch.setattr(
            watch, "_end", lambda *_, thread=thread, seen=seen: seen.append(thread.is_alive())
        )
        thread.start()
        if waits:
            threading.Timer(0.05, writes.set).start()
        watch.fail(error)
        assert seen == [not waits]
        writes.set()
        thread.join()


def test_who_keeps_the_store_leaves_it_last(beating, monkeypatch):
    """A rank that asked later how the last save had ended found no store, and said that it had failed."""
    zero, one = make_channels(2)
    watches = [
        Watch(cast("Any", SimpleNamespace(channel=channel, environment=Environment(rank))))
        for rank, channel in enumerate((zero, one))
    ]
    zero.keeps_store = zero.has_met = one.has_met = True
    left: list[int] = []
    for watch in watches:
        watch.begin(DistributedConfig())
    keeper = threading.Thread(target=lambda: (watches[0].close(), left.append(0)))
    keeper.start()
    time.sleep(0.3)
    assert left == []
    watches[1].close(lambda: left.append(1))
    keeper.join(patient(60.0))
    assert left == [1, 0]
