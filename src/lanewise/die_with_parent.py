"""Ends a process with its parent, so that nothing remains of a killed launcher; and names a process."""

import ctypes
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

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


def name_process(name: str) -> None:
    """Show this process under a name of at most 15 characters in `ps` and `top` (Linux)."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")
