"""Temporary folders, which are removed with the processes of a command even if these are killed."""

import fcntl
import multiprocessing.util
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lanewise.errors import StorageError, text_of

_PREFIX = "lanewise-"
_LOCK = "lock"
_MAX_LENGTH = 70
"""The most characters of a folder's path: a socket in a folder in it needs about 32 more, of at most 107."""

_MOST_ATTEMPTS = 100
_AFTER_MULTIPROCESSING = -200
"""Exit priority: multiprocessing removes its own folders at -100."""
_until_exit = ExitStack()
_folders: dict[Path, int] = {}
"""The folders in use, and the process that made each: a process that was forked has them, too."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for this process and those that it starts, and remove it in the end.

    A process that is killed removes nothing. So each folder has a lock, which its process holds as long as it
    lives. The next call removes the folders of this machine and this user whose lock is free.
    """
    with ExitStack() as stack:
        try:
            _remove_abandoned()
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            stack.callback(_remove, folder)
            _folders[folder] = os.getpid()
            unnamed = folder / f"{_LOCK}.tmp"
            lock = stack.enter_context(unnamed.open("w", encoding="utf-8"))
            with suppress(OSError):  # on a file system without locks it is never removed as abandoned
                fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(socket.gethostname())
            lock.flush()
            unnamed.rename(folder / _LOCK)  # under this name the lock is never free while the process lives
        except OSError as error:
            raise StorageError(
                f"there is no place for temporary files: {text_of(error)}. Set TMPDIR to a folder that can "
                "be written."
            ) from error
        yield folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder like `scratch_folder`, where this process and those that it starts keep temporary files.

    Among them are kernels that torch caches.
    """
    with scratch_folder() as folder:
        before = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir, variable = before
            del os.environ["TMPDIR"]
            if variable is not None:
                os.environ["TMPDIR"] = variable


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    del _folders[folder]


def folder_until_exit() -> Path:
    """Make a folder that is removed at the exit of this process, and do `keep_sockets_in` with it."""
    folder = _until_exit.enter_context(scratch_folder())
    keep_sockets_in(folder)
    multiprocessing.util.Finalize(None, _until_exit.close, exitpriority=_AFTER_MULTIPROCESSING)
    return folder


def remove_all() -> None:
    """Remove the folders of this process, and of killed ones; a process that uses os._exit calls this before.

    Processes that write there may still live, so it may take several attempts.
    """
    _remove_abandoned()
    for folder in (folder for folder, pid in _folders.items() if pid == os.getpid()):
        for _ in range(_MOST_ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break


def keep_sockets_in(folder: Path) -> None:
    """Let this process and those that it forks, to load data, keep multiprocessing's sockets in a folder.

    Otherwise each would make a `pymp-*` of its own, which would remain when it is killed. The user's
    temporary files stay where they are.
    """
    if len(str(folder)) > _MAX_LENGTH:
        return
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        multiprocessing.util.get_temp_dir()  # makes one and remembers it, also for children
    finally:
        tempfile.tempdir = before


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # in use, or gone meanwhile
            if path.parent.lstat().st_uid != os.getuid():
                continue
            with path.open("r+", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read() == socket.gethostname():  # a lock may be unknown to other machines
                    shutil.rmtree(path.parent, ignore_errors=True)
