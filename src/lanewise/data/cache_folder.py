"""The folder in which datasets keep what takes long to make, and how a single process makes it."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from lanewise.runs.file import open_log

logger = logging.getLogger(__name__)

CacheDir: TypeAlias = str | os.PathLike[str] | None
"""The folder that a user names; None stands for `$XDG_CACHE_HOME/lanewise`, or `~/.cache/lanewise`."""


def cache_folder(cache_dir: CacheDir) -> Path:
    """Return the absolute path of the folder, which need not be there yet.

    Raises:
        RuntimeError: if this user has no home folder.
    """
    folder = Path(cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lanewise"))
    return folder.expanduser().absolute()


@contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Wait until no other process of this machine does the same.

    Args:
        lock: a file that is there as long as a process does it.
        what: says what is done, as the end of a sentence that begins with `waiting for another process to`.
    """
    with open_log(lock) as locked:
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process to %s", what)
            fcntl.flock(locked, fcntl.LOCK_EX)
        except OSError as error:  # of a network's file system: each process does it then
            logger.debug("%s cannot be locked: %s", lock, error)
        yield
        # A process that waits has the file open; a later one makes a new one, and finds what was made.
        lock.unlink(missing_ok=True)
