"""Refuses the ways to exit that the user's code does not have while a job runs: sys.exit and os._exit(0)."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from lanewise.errors import refuse_exit

if TYPE_CHECKING:
    from lanewise.processes.watch.watch import Watch


@contextmanager
def refusing_exit(watch: "Watch | None" = None) -> Iterator[None]:
    """Make an error of what would end this process as if its job were done: sys.exit and os._exit(0).

    Args:
        watch: ends the process after os._exit(0), when no code of it may run; None: os._exit is let alone.

    Raises:
        TaskError: instead of a SystemExit.
    """
    pid, real_exit = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if watch is not None and status == 0 and os.getpid() == pid:  # not one that was forked, to load data
            where = traceback.extract_stack(sys._getframe(1), limit=1)[0]  # noqa: SLF001 - there is no other way
            watch.fail(refuse_exit("os._exit(0)", where))
        real_exit(status)

    os._exit = refuse  # such an exit writes nothing, and the user would not know what ended the process
    try:
        yield
    except SystemExit as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise refuse_exit(f"sys.exit({error.code!r})", where) from error
    finally:
        os._exit = real_exit
