"""Training, from the command line or from Python."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lanewise.config import dump_config
from lanewise.jobs.job import Job
from lanewise.run_dir import RunDir

if TYPE_CHECKING:
    from lanewise.callback import Callback
    from lanewise.world.world import World


@dataclass(frozen=True)
class TrainJob(Job):
    """Trains; the result is what the last evaluation gave."""

    callbacks: "tuple[Callback, ...]" = ()
    """Observers that were given as objects."""

    @property
    def run_dir(self) -> RunDir:
        """Where the run writes."""
        return RunDir(Path(self.config.train.run_dir))

    def claim(self) -> AbstractContextManager[object]:
        """See `Job`."""
        return self.run_dir.claim()

    def log_file(self, rank: int) -> Path:
        """See `Job`."""
        return self.run_dir.log(rank)

    def run(self, world: "World") -> dict[str, float]:
        """See `Job`."""
        from lanewise.engine import build_callbacks, build_engine
        from lanewise.loggers import JsonlLogger, ProgressLogger, TensorBoardLogger
        from lanewise.world.determinism import exact_pins

        engine = build_engine(self.config, world, self.task)
        callbacks: list[Callback] = []
        if world.rank == 0:
            pins = "".join(f"# {name}: {value}\n" for name, value in exact_pins(world.device).items())
            self.run_dir.config.write_text(f"{pins}{dump_config(self.config)}", encoding="utf-8")
            callbacks = [
                JsonlLogger(self.run_dir.metrics),
                TensorBoardLogger(self.run_dir.tensorboard),
                ProgressLogger(),
                *build_callbacks(self.config),
                *self.callbacks,
            ]
        values = engine.fit(self.run_dir, callbacks)
        world.all_gather_object(None)  # no rank goes on before the model is on disk
        return values
