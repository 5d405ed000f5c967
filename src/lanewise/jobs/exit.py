"""How a process of a world exits after an error, and which ways to exit the user's code does not have."""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lanewise.errors import LanewiseError, mistakes_of, refuse_exit, traceback_of
from lanewise.jobs.scratch import remove_all
from lanewise.launch import has_agent, record_failure


def exit_after(error: BaseException, rank: int) -> NoReturn:
    """End a process of a world after an error, which its agent and its log are told."""
    try:
        _report(error, rank)
        remove_all()
    finally:  # even if the logs or the console cannot be written
        # A usual exit would run destructors that wait for ranks which have ended.
        os._exit(error.exit_code if isinstance(error, LanewiseError) else 1)


def _report(error: BaseException, rank: int) -> None:
    record_failure(error)
    if logging.root.handlers:
        # Each rank has its error in its log. On the console the first one is the cause of the others; an
        # agent shows it by itself.
        logging.getLogger(__name__).error(
            "rank %d failed",
            rank,
            exc_info=error,
            extra={"is_for_file_only": has_agent(), "shown_once_as": "the first failure"},
        )
    elif not has_agent():
        lines = [traceback_of(error)]
        if isinstance(error, LanewiseError):
            lines = [f"error: {mistake}" for mistake in mistakes_of(error)]
        sys.stderr.writelines(f"{line}\n" for line in lines)
    logging.shutdown()


@contextmanager
def refusing_exit(rank: int) -> Iterator[None]:
    """Make an error of what would end this process as if its job were done: sys.exit and os._exit(0).

    Raises:
        TaskError: instead of a SystemExit. After os._exit(0) no code of this process may run, so that the
            process ends at once, as a failure.
    """
    pid, real_exit = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if status == 0 and os.getpid() == pid:  # not a process that was forked, to load data
            where = traceback.extract_stack(sys._getframe(1), limit=1)[0]  # noqa: SLF001 - there is no other way
            exit_after(refuse_exit("os._exit(0)", where), rank)
        real_exit(status)

    os._exit = refuse  # such an exit writes nothing, and the user would not know what ended the process
    try:
        yield
    except SystemExit as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise refuse_exit(f"sys.exit({error.code!r})", where) from error
    finally:
        os._exit = real_exit
