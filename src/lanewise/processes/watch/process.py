"""What can be seen of a process from outside, and of this one's threads from within."""

import os
import sys
import threading
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

from lanewise.errors import begin_with_users_code

ENDED = "which has ended"
STOPPED = "which is stopped (SIGSTOP)"
_STATES = {"T": STOPPED, "t": "which a debugger holds", "D": "which waits for a disk"}
_DEBUGGERS = {"bdb", "pdb", "pydevd", "debugpy", "_pydevd_bundle"}
_LONGEST_STACK = 12


@cache
def process_table() -> str:
    """Name the table of processes that this one is in: of a host, or of a container; empty if not Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def state_of(pid: int, table: str) -> str:
    """Say what state a process is in; empty where it runs, or cannot be looked at.

    Args:
        pid: its number.
        table: the `process_table` that it is in.
    """
    if not table or table != process_table():
        return ""
    letter = (_stat(pid) or "X")[0]
    return ENDED if letter in "ZX" else _STATES.get(letter, "")


def is_sibling(pid: int) -> bool:
    """Tell whether a process has the same parent as this one (on Linux; elsewhere nobody knows)."""
    return _stat(pid)[1:2] == [str(os.getppid())]


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process: its state, its parent and more; nothing if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def main_stack() -> str:
    """Write the python stack of the main thread: the user's code, or the innermost frames of ours."""
    frame = _main_frame()
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    begin_with_users_code(stack)
    return "".join(traceback.format_list(stack[-_LONGEST_STACK:]))


def innermost_module() -> str:
    """Return the name of the module whose code the main thread runs."""
    frame = _main_frame()
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def is_debugged() -> bool:
    """Tell whether the user looks at the main thread in a debugger, and so has stopped it."""
    frame = _main_frame()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
