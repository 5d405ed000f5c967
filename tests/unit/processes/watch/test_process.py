"""What can be seen of a process."""

import os
import pdb  # noqa: T100 - what is looked for
import signal
import subprocess
import sys
import threading
import time

from lanewise.processes.watch import process as module
from lanewise.processes.watch.process import (
    ENDED,
    innermost_module,
    is_debugged,
    main_stack,
    process_table,
    state_of,
)
from tests.patience import patient


def test_a_process_is_seen_to_run_to_be_stopped_and_to_have_ended():
    with subprocess.Popen(["sleep", "600"]) as seen:
        assert state_of(seen.pid, process_table()) == ""
        os.kill(seen.pid, signal.SIGSTOP)
        os.waitpid(seen.pid, os.WUNTRACED)
        assert state_of(seen.pid, process_table()) == "which is stopped (SIGSTOP)"
        os.kill(seen.pid, signal.SIGKILL)
        deadline = time.monotonic() + patient(60)
        while state_of(seen.pid, process_table()) != ENDED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state_of(seen.pid, process_table()) == ENDED  # nobody has waited for it yet
    assert state_of(seen.pid, process_table()) == ENDED


def test_only_children_of_the_same_parent_are_siblings():
    look = (
        "import sys\nfrom lanewise.processes.watch.process import is_sibling\n"
        "print(*(is_sibling(int(pid)) for pid in sys.argv[1:]))"
    )
    with subprocess.Popen(["sleep", "600"]) as sibling:
        numbers = [sibling.pid, os.getpid(), 1, 0, -1, 2**22 + 1]
        done = subprocess.run(
            [sys.executable, "-c", look, *map(str, numbers)], capture_output=True, text=True, check=True
        )
        sibling.kill()
    assert done.stdout.split() == ["True", *["False"] * 5]


def test_nothing_is_said_of_a_process_of_another_host():
    assert state_of(2**22 + 1, "of another host") == ""


def seen_from_a_thread(function):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(function()))
    thread.start()
    thread.join()
    return seen[0]


def test_the_stack_is_that_of_the_main_thread():
    assert "test_the_stack_is_that_of_the_main_thread" in seen_from_a_thread(main_stack)
    assert seen_from_a_thread(innermost_module) == "threading"


def test_a_process_in_a_debugger_is_known(monkeypatch):
    assert not seen_from_a_thread(is_debugged)
    found = []
    debugger = pdb.Pdb()
    monkeypatch.setattr(debugger, "interaction", lambda *_: found.append(seen_from_a_thread(is_debugged)))
    debugger.runcall(lambda: None)
    assert found[0]


def test_without_a_process_table_nothing_is_said(monkeypatch):
    monkeypatch.setattr(module, "process_table", lambda: "")
    assert state_of(os.getpid(), "") == ""
