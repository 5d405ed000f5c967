"""Ties the life of a process to its parent's, so that a killed launcher or trainer leaves nothing behind."""

import ctypes
import multiprocessing
import os
import signal
import sys

PARENT_PID_VARIABLE = "LANEWISE_PARENT_PID"
"""Environment variable in which a launcher tells its workers its process id."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing happens).

    The parent may have ended before this call, so that is checked afterwards: by the pid that a launcher left
    in the environment, or through multiprocessing where this is one of its children.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        is_orphan = not parent.is_alive()
    else:
        is_orphan = os.getppid() != int(os.environ.get(PARENT_PID_VARIABLE, os.getppid()))
    if is_orphan:
        os.kill(os.getpid(), signal.SIGKILL)
