"""Decides when a run saves a checkpoint, and saves it; also ends the run after a signal or for a callback."""

import time
from collections.abc import Callable
from typing import final

from lanewise.data import StepEnd
from lanewise.engine.run.run import Run
from lanewise.engine.step.guard.equal_state import require_equal_state
from lanewise.engine.step.wire import Votes
from lanewise.errors import CheckpointError, PreemptedError
from lanewise.processes.world.digests import gather_digests
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver


@final
class Saving:
    """Saves checkpoints after steps on which all ranks agree, and always after the last step.

    Args:
        run: the run to save.
        folder: the folder of its checkpoints.
        wants_stop: tells whether this process was asked to save and stop.

    Raises:
        CheckpointError: if a value in the state cannot be saved.
    """

    def __init__(
        self, run: Run, folder: CheckpointFolder, wants_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._run = run
        self._config = config = run.config.checkpoint
        self._state = run.state
        self._state.require_savable()
        self._saver = Saver(
            folder,
            run.world,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            sign=1 if run.evaluation is None else run.evaluation.sign,
        )
        self._last_save = time.monotonic()
        self.wants_stop = wants_stop
        self.stop_reason: Callable[[], str | None] = lambda: None
        """Returns why a callback of this process wants to end the run; None where none does."""

    def vote(self) -> Votes:
        """Tell what this process wants after this step."""
        seconds = self._config.every.seconds
        is_late = seconds is not None and time.monotonic() - self._last_save >= seconds
        stops = self.wants_stop()
        return Votes(self._run.world.rank == 0 and is_late, stops, self.stop_reason() is not None)

    def is_due_after(self, step: int, end: StepEnd, *, ends_run: bool) -> bool:
        """Tell whether to save after a step even if no rank votes for it; the same on every rank.

        Args:
            step: the step that was taken.
            end: where it was.
            ends_run: whether it was the last one.

        Raises:
            CheckpointError: if an earlier save failed.
        """
        if self._saver.failure is not None:
            self._saver.finish()
        done = step + 1
        every_steps, every_epochs = self._config.every.steps, self._config.every.epochs
        return (
            ends_run
            or (every_steps is not None and done % every_steps == 0)
            or (every_epochs is not None and end.ends_epoch and (end.epoch + 1) % every_epochs == 0)
        )

    def save(self, step: int, metric: float | None, *, stops: bool) -> None:
        """Save after a step. Collective: every rank must call this.

        Args:
            step: the step that was taken.
            metric: the value by which checkpoints are compared.
            stops: whether a signal stops the run here.

        Raises:
            CheckpointError: if this save, or the one before, failed.
            TaskError: if what the task does after an update differs between processes.
            WorldError: if a digest differs between them.
            PreemptedError: if the run stops here.
        """
        deadline = time.monotonic() + self._config.preempt_seconds
        if stops:  # the previous save may still be in progress
            self._finish_before(deadline, step)
        run = self._run
        state, digests = self._state.take(), dict[str, str]()
        if run.config.integrity.digest_every_steps is None:
            require_equal_state(run.training.model, run.world, step)
        else:
            digests = gather_digests(state, run.world, step + 1)
        if run.identity["num_steps"] is None and any(run.world.all_gather_tree(run.length.is_asked)):
            run.note_length()
        manifest = Manifest(step=step + 1, metric=metric, identity=run.identity, files=(), digests=digests)
        self._saver.save(state, manifest)
        self._last_save = time.monotonic()
        if stops:
            self._finish_before(deadline, step)
            raise PreemptedError(
                f"a signal stopped the run after {step + 1} steps, and a checkpoint was saved. "
                "Go on with --resume."
            )

    def finish(self) -> None:
        """Wait until the last save is on disk. Collective: every rank must call this.

        Raises:
            CheckpointError: if it failed.
        """
        self._saver.finish()

    def _finish_before(self, deadline: float, step: int) -> None:
        """Wait until the last save is on disk; raise CheckpointError at the deadline."""
        if not self._saver.finish(max(0.0, deadline - time.monotonic())):
            raise CheckpointError(
                f"a signal stopped the run, and the checkpoint after {step + 1} steps was not written within "
                f"checkpoint.preempt_seconds={self._config.preempt_seconds:g}. Earlier ones are as they were."
            )
