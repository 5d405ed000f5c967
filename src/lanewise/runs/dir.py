"""The folder of a run: its files, and the lock of the process that may write to it."""

import fcntl
import logging
import os
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, final

from lanewise.errors import RunDirError
from lanewise.runs.file import (
    is_full,
    open_log,
    open_regular,
    reason,
    remove_leftover,
    storage_error,
    writing,
)

logger = logging.getLogger(__name__)
_SECONDS_OF_A_LOST_LOCK = 150.0
"""How long a file server may keep the lock of a host that is lost; NFS does 90 s."""
_SECONDS_BETWEEN_TRIES = 0.5


@final
class RunDir:
    """Paths in the folder of a run.

    run_dir/
        config.yaml               the resolved configuration, which `lanewise train` accepts
        run.jsonl                 a JSON object for each start of the run, and for each end
        metrics.jsonl             a JSON object for each logged step and for each evaluation
        media.jsonl               a JSON object for each text and each image that a callback logged
        phases/rank-00000.jsonl   one file for each rank: what it spent its time on
        logs/rank-00000.log       one file for each rank
        model.safetensors         the trained weights under the plain module's names
        averaged.safetensors      the moving average of the weights, if train.ema_decay is set
        best.safetensors          the weights with the best evaluation so far, if evaluate.best is set
        checkpoints/step-000500/  the state after 500 steps, from which a run goes on
        tensorboard/              event files
        profile/                  a trace and a table for each rank, with train.profile_steps
        audit/                    what every lane was given, with --audit
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.record = path / "run.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.media = path / "media.jsonl"
        self.phases = path / "phases"
        self.model = path / "model.safetensors"
        self.averaged_model = path / "averaged.safetensors"
        self.best_model = path / "best.safetensors"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.audit = path / "audit"
        self._models = (self.model, self.averaged_model, self.best_model)

    def log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def require_free(self) -> None:
        """Raise RunDirError if the folder holds a run already."""
        if held := self.held():
            raise RunDirError(
                f"run_dir {self.path} holds a run already (it has {held[0].name}). Go on with it (--resume, "
                "from Python resume=True), replace it (--overwrite, overwrite=True), or choose another "
                "train.run_dir, such as one with {time} or {number} in its name."
            )

    def claim(
        self,
        *,
        may_hold_run: bool = False,
        overwrites: bool = False,
        launch: str = "",
        lost_seconds: float = 0.0,
    ) -> ExitStack:
        """Make the folder and become its only writer, until what is returned is closed or the process ends.

        Args:
            may_hold_run: whether it may hold a run already, to go on with.
            overwrites: whether to remove the files of a run that it holds; other files in it stay.
            launch: the id of the launch that started this process.
            lost_seconds: how long a process that it started before may write where nobody hears of it; 0: it
                started none. A file server keeps the lock of a lost host for a while, which is waited for.

        Half-written files of a killed run are removed.

        Raises:
            RunDirError: if another process writes it, it holds a run already, or it cannot be written.
            StorageError: if the disk is full, or a file in it is not what it should be.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                what = "run_dir", "another train.run_dir"
                lock_folder(self.path, stack, *what, launch=launch, lost_seconds=lost_seconds)
            except OSError as error:
                if is_full(error):
                    raise storage_error(error, self.path) from error
                raise cannot_be_written(self.path, error) from None
            if overwrites and self.held():
                self._remove()
            if not may_hold_run:
                self.require_free()
            with writing(self.path):
                if not may_hold_run:  # a run that ended in its first step has left it: this is another run
                    self.record.unlink(missing_ok=True)
                for file in (self.config, self.metrics, *self._models):
                    remove_leftover(file)
            return stack.pop_all()

    def held(self) -> list[Path]:
        """Return the files and folders that only a run with at least one step leaves."""
        held = [path for path in (self.metrics, *self._models) if os.path.lexists(path)]
        for folder in (self.checkpoints, self.tensorboard, self.audit):
            with writing(folder), suppress(FileNotFoundError):
                held += [folder] if any(folder.iterdir()) else []
        return held

    def _remove(self) -> None:
        """Remove the files of a run; the checkpoints, from which it could go on, last."""
        files = (self.config, self.record, self.metrics, self.media, *self._models)
        folders = (
            self.phases,
            self.log(0).parent,
            self.tensorboard,
            self.profile,
            self.audit,
            self.checkpoints,
        )
        there = [folder for folder in folders if os.path.lexists(folder)]
        for folder in there:
            if folder.is_symlink() or not folder.is_dir():
                link = f"a link to {folder.readlink()}" if folder.is_symlink() else ""
                what = f"{link}, and what is there may belong to others" if link else "no folder"
                raise RunDirError(
                    f"run_dir {self.path} cannot be replaced: {folder.name} in it is {what}. Nothing was "
                    "removed. Remove it, or choose another train.run_dir."
                )
        with writing(self.path):
            for file in files:
                file.unlink(missing_ok=True)
            for folder in there:
                shutil.rmtree(folder)


def lock_folder(
    path: Path, stack: ExitStack, what: str, instead: str, launch: str = "", lost_seconds: float = 0.0
) -> None:
    """Keep other processes out of a folder, on every file system, until the stack is closed.

    Args:
        path: the folder, which is there.
        stack: gets what unlocks it.
        what: how an error calls the folder.
        instead: what else the user may choose.
        launch: see `RunDir.claim`.
        lost_seconds: likewise.

    Raises:
        RunDirError: if it is locked; names the process that has it.
        OSError: if it cannot be written.
    """
    lock = stack.enter_context(open_log(path / ".lock"))
    own = f"process {os.getpid()} on {socket.gethostname()}{launch and f' of launch {launch}'}\n"
    deadline = time.monotonic() + (_SECONDS_OF_A_LOST_LOCK if lost_seconds else 0.0)
    try:
        while not _is_locked(lock) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open_regular(path / ".lock") as file:
            holder = file.readline(300).decode(errors="replace").strip() or "another process"
        raise RunDirError(
            f"{what} {path} is in use by {holder}. Choose {instead}, or wait for that one to end."
        ) from None
    except OSError as error:  # some network file systems have no locks
        owner = path / ".owner"
        if launch and lost_seconds and owner.exists():
            time.sleep(lost_seconds)  # a lost host may go on for as long
            _remove(owner, f" of launch {launch}\n")
        try:
            with owner.open("x", encoding="utf-8") as file:
                file.write(own)
        except FileExistsError:
            raise RunDirError(
                f"{what} {path} is in use by another process, or was until that was killed: it cannot be "
                f"locked ({error.strerror}). Choose {instead}, or, if the process that {owner} names has "
                "ended, remove that file."
            ) from None
        stack.callback(_remove, owner, own)
        logger.warning(
            "%s cannot be locked (%s): %s keeps other runs out, and stays if this process is killed",
            path,
            error.strerror,
            owner,
        )
    else:
        with suppress(OSError):  # of a full disk, which keeps nobody out
            lock.truncate(0)
            lock.write(own)


def _is_locked(lock: Any) -> bool:
    """Lock a file, unless somebody has locked it."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _remove(owner: Path, end: str) -> None:
    """Remove a file, if it ends like this: a later start may have taken its place."""
    with suppress(FileNotFoundError):
        if owner.read_text(encoding="utf-8").endswith(end):
            owner.unlink()


def cannot_be_written(path: Path, error: OSError) -> RunDirError:
    """Say why a run directory cannot be used."""
    return RunDirError(f"run_dir {path} cannot be written: {reason(error, path)}.")
