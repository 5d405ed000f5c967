"""Training, from the command line or from Python."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.run_dir_pattern import find_or_make, is_pattern
from lanewise.commands.jobs.signals import training, wants_stop
from lanewise.config.load import dump_config
from lanewise.errors import PreemptedError, StorageError
from lanewise.launch.agent import LAUNCH_VARIABLE
from lanewise.runs.dir import RunDir
from lanewise.runs.file import replace_text
from lanewise.runs.record import RunEnd, RunRecord

if TYPE_CHECKING:
    from lanewise.processes.world.world import World
    from lanewise.runs.callback import Callback

logger = logging.getLogger(__name__)


def _launch() -> dict[str, Any]:
    """Return what the launcher says of itself and of its hosts, if it does."""
    launch: dict[str, Any] = json.loads(os.environ.get(LAUNCH_VARIABLE, "{}"))
    return launch


@final
@dataclass(frozen=True)
class TrainJob(Job):
    """Trains; the result is what `TrainResult` needs, as plain values."""

    callbacks: "tuple[Callback, ...]" = ()
    """Observers that were given as objects."""
    is_resumed: bool = False
    """Whether to go on from the newest good checkpoint, if there is one."""
    allow: tuple[str, ...] = ()
    """What may differ from what the checkpoint is of."""
    overwrites: bool = False
    """Whether to remove the run that is in run_dir first."""
    is_audited: bool = False
    """Whether to write what every lane is given; a run that was audited before goes on so."""
    can_stop: ClassVar[bool] = True

    @property
    def run_dir(self) -> RunDir:
        """The folder in which the run writes."""
        return RunDir(Path(self.config.train.run_dir))

    @contextmanager
    def claim(self, *, is_restarted: bool = False) -> Iterator[None]:
        """An error is the end of the run, unless rank 0 has told it already.

        If the error only follows from another process's, the watch knows which one the end is.
        """
        may_hold_run = self.is_resumed or is_restarted
        with self.run_dir.claim(
            may_hold_run=may_hold_run,
            overwrites=self.overwrites and not may_hold_run,
            launch=_launch().get("launch", ""),
            lost_seconds=(self.config.distributed.lost_seconds or 0.0) if is_restarted else 0.0,
        ):
            record = RunRecord(self.run_dir.record)
            try:
                yield
            except BaseException as error:
                from lanewise.processes.watch.failure import is_consequence

                if not is_consequence(error):
                    with suppress(StorageError):  # that the run failed is what matters
                        record.end(RunEnd.of_error(error))
                if isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt(self._describe_interrupt()) from None
                raise

    def _describe_interrupt(self) -> str:
        from lanewise.runs.checkpoint.folder import CheckpointFolder

        saved = CheckpointFolder(self.run_dir.checkpoints).all()
        return f"--resume continues from {saved[0]}" if saved else "no checkpoint was saved yet"

    def require_free(self) -> None:
        may_hold_run = self.is_resumed or self.overwrites or is_pattern(self.config.train.run_dir)
        if not may_hold_run:
            self.run_dir.require_free()

    def settled(self, agree: Callable[[Callable[[], str]], str] = lambda choose: choose()) -> "TrainJob":
        """A run directory of its own, where train.run_dir is a pattern."""
        train = self.config.train
        if not is_pattern(train.run_dir):
            return self
        run_dir = agree(lambda: find_or_make(train.run_dir, newest=self.is_resumed))
        return replace(self, config=replace(self.config, train=replace(train, run_dir=run_dir)))

    def program(self, config_file: str) -> Sequence[str]:
        allow = ["--allow", ",".join(self.allow)] if self.allow else []
        return ["train", config_file, "--resume", *allow, *["--audit"] * self.is_audited]

    @property
    def shared_folder(self) -> Path | None:
        """Every process writes its part of a checkpoint there."""
        run_dir = self.run_dir.path
        return run_dir.parent if is_pattern(run_dir.name) else run_dir

    @property
    def stands_still(self) -> bool:
        return RunRecord(self.run_dir.record).stands_still()

    def log_file(self, rank: int) -> Path:
        return self.run_dir.log(rank)

    def run(self, world: "World") -> dict[str, Any]:
        from lanewise.commands.jobs.provenance import commit_of, describe_start
        from lanewise.data.audit import AuditLog
        from lanewise.engine.engine import Engine
        from lanewise.engine.run.build import build_callbacks, build_run
        from lanewise.engine.run.resume import resume_run
        from lanewise.engine.run.saving import Saving
        from lanewise.processes.device.determinism import exact_pins
        from lanewise.runs.checkpoint.folder import CheckpointFolder
        from lanewise.runs.loggers import build_loggers

        folder = CheckpointFolder(self.run_dir.checkpoints)
        goes_on = self.is_resumed or world.is_restarted
        is_restored = goes_on and world.broadcast_tree(world.rank == 0 and bool(folder.all()))
        run = build_run(self.config, world, self.task, is_restored=is_restored)
        first_step = resume_run(run, folder, self.allow) if goes_on else 0
        recording = {}
        if self.is_audited or self.run_dir.audit.exists():  # one with gaps would be worth nothing
            plan, tables = run.loader.plan()
            plan["seed"] = self.config.train.seed
            place = self.run_dir.audit, world.rank, world.world_size
            recording["record"] = AuditLog(*place, first_step, plan, tables).record
        callbacks: list[Callback] = []
        start = {**describe_start(run, first_step), "allow": list(self.allow), **_launch()}
        history, run_id = None, ""
        if world.rank == 0:
            history = RunRecord(self.run_dir.record)
            git = start["git"] = commit_of(run.runner.task, self.config.search_path)
            if git is not None and not git["is_clean"]:
                logger.info("the code is not that of commit %.12s: git status names the files", git["commit"])
            run_id = history.begin(start)
            folder.remove_leftovers(logger.warning)
            pins = "".join(f"# {name}: {value}\n" for name, value in exact_pins(world.device).items())
            replace_text(self.run_dir.config, f"{pins}{dump_config(self.config)}")
            is_due = run.evaluation is not None and run.evaluation.is_due
            begin = self.run_dir, first_step, folder.jumps
            loggers = build_loggers(*begin, self.config.log.console, evaluates_first=is_due)
            callbacks = [*loggers, *build_callbacks(self.config), *self.callbacks]
        saving = Saving(run, folder, wants_stop)
        engine = Engine(run, first_step=first_step, saving=saving, **recording)
        try:
            with training():
                values = engine.fit(self.run_dir, callbacks, run_id)
        except PreemptedError:
            if history is not None:
                with suppress(StorageError):  # the checkpoint is on disk
                    history.end(RunEnd("preempted", engine.next_step))
            raise
        if history is not None:  # another error's end is told by `claim`, or by what ends this process
            is_early = not engine.ends_with(engine.next_step - 1)
            text = engine.stop_reason if is_early else None
            history.end(RunEnd("stopped early" if is_early else "finished", engine.next_step, text=text))
        world.all_gather_tree(None)  # no rank goes on before the model is on disk
        best = None if run.evaluation is None else run.evaluation.best
        best_step, best_value = (None, None) if best is None else best
        return {
            "run_dir": self.config.train.run_dir,
            "step": engine.next_step,
            "evaluation": values,
            "best_step": best_step,
            "best_value": best_value,
        }
