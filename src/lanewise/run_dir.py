"""The folder of a run: what is in it, and who may write it."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lanewise.errors import LanewiseError, RunDirError
from lanewise.run_file import is_full, open_log, reason, remove_leftover, storage_error, writing


@dataclass(frozen=True)
class RunDir:
    """Paths in the folder of a run.

    run_dir/
        config.yaml               the resolved configuration
        metrics.jsonl             a line for each logged step and for each evaluation
        logs/rank-00000.log       one file for each rank
        model.safetensors         the trained model
        averaged.safetensors      the moving average of its weights, if train.ema_decay is set
        best.safetensors          the best model by evaluate.best, if that is set
        checkpoints/step-000500/  the state after 500 steps, from which a run goes on
        tensorboard/              event files
        audit/                    what every lane was given, with --audit
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration; `lanewise train` accepts it."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object for each logged step and for each evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """The trained weights under the plain module's names."""
        return self.path / "model.safetensors"

    @property
    def averaged_model(self) -> Path:
        """The moving average of the weights."""
        return self.path / "averaged.safetensors"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def audit(self) -> Path:
        """Folder of what every lane was given."""
        return self.path / "audit"

    @property
    def best_model(self) -> Path:
        """The weights with the best evaluation so far."""
        return self.path / "best.safetensors"

    def log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def claim(self, *, may_hold_run: bool = False) -> IO[str]:
        """Make the folder and become its only writer, until the returned file is closed or the process ends.

        Args:
            may_hold_run: whether it may hold a run already, to go on with.

        What a killed run left half written is removed.

        Raises:
            RunDirError: if another process writes it, it holds a run already, or it cannot be written.
            StorageError: if the disk is full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open_log(self.path / ".lock")
        except OSError as error:
            if is_full(error):
                raise storage_error(error, self.path) from error
            raise RunDirError(f"run_dir {self.path} cannot be written: {reason(error, self.path)}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = [] if may_hold_run else self._held()
            if held:
                raise RunDirError(
                    f"run_dir {self.path} holds a run already (it has {held[0].name}). "
                    "Go on with it (--resume, from Python resume=True), or choose another train.run_dir."
                )
            with writing(self.path):
                for file in (self.config, self.metrics, *self._models):
                    remove_leftover(file)
        except BlockingIOError:
            lock.close()
            raise RunDirError(
                f"run_dir {self.path} is in use by another process. "
                "Choose another train.run_dir, or wait for that one to end."
            ) from None
        except LanewiseError:
            lock.close()
            raise
        return lock

    @property
    def _models(self) -> tuple[Path, ...]:
        return self.model, self.averaged_model, self.best_model

    def _held(self) -> list[Path]:
        """Return what only a run that took a step leaves; its log and configuration may be written anew."""
        folders = [
            path
            for path in (self.checkpoints, self.tensorboard, self.audit)
            if path.is_dir() and any(path.iterdir())
        ]
        return [path for path in (self.metrics, *self._models) if os.path.lexists(path)] + folders
