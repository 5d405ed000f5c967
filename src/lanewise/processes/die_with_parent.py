"""Ends a process with its parent, or what one has started, so that nothing remains; and names a process."""

import ctypes
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from setproctitle import getproctitle, setproctitle

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing happens).

    The parent is the thread that started this process. It may have ended before this call, so that is checked
    afterwards.

    Args:
        parent_pid: the process id of the parent; None: multiprocessing knows it, where this is one of its
            children.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent_pid is not None:
        is_orphan = os.getppid() != parent_pid
    else:
        is_orphan = parent is not None and not parent.is_alive()
    if is_orphan:
        os.kill(os.getpid(), signal.SIGKILL)


def end_session(leader_pid: int) -> None:
    """Kill the processes of the session that a process leads or led, but for that one.

    They are what it started, and what those started in turn, unless one began a session of its own (Linux;
    elsewhere nothing happens).
    """
    if sys.platform != "linux":
        return
    for _ in range(2):  # one may start another while the first pass looks
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            with suppress(ProcessLookupError, PermissionError):
                if pid != leader_pid and os.getsid(pid) == leader_pid:
                    os.kill(pid, signal.SIGKILL)


def find_command_line() -> str:
    """Return the title of this process, which is its command line before it is named.

    The first call finds where that is, which must be before the environment, which is beside it, is cleared.
    That costs the last character, so only a process that will be named calls it.
    """
    os.environ["SPT_NOENV"] = "1"
    title = getproctitle()
    del os.environ["SPT_NOENV"]
    return title


def name_process(title: str) -> None:
    """Show a title instead of the command line of this process, in `ps`, py-spy and htop.

    It takes the room of the command line, so the end of a long title may be missing: with more room the
    environment in /proc would be lost.
    """
    find_command_line()
    setproctitle(title.encode(errors="replace").decode())


def name_child(what: str) -> None:
    """Add to the title of this process, which it has from the one that forked it, what it is."""
    name_process(f"{what} of {find_command_line()}")
