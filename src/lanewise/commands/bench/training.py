"""Trains a mode from the first step of the run on, and evaluates the model."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from lanewise.commands.bench.job import digest_of
from lanewise.commands.jobs.job import Job
from lanewise.config import EvaluateConfig
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.processes.world.world import World


@dataclass(frozen=True)
class Trained:
    """What came of the steps that a mode was trained for."""

    num_steps: int
    seconds: float
    """How long the steps took; neither the start nor the evaluation is in it."""
    values: Mapping[str, float]
    """The values of the evaluation by `set/metric`; empty where the task has no eval datasets."""
    model: str
    """The digest of the model."""


@final
@dataclass(frozen=True)
class TrainingJob(Job):
    """Trains for some steps, or to the end of the run if that comes before, and evaluates once.

    Nothing is saved or shown. The result is a `Trained`, as a tree.
    """

    num_steps: int = field(kw_only=True)

    def run(self, world: World) -> dict[str, Any]:
        logging.getLogger().setLevel(logging.ERROR)
        num_steps = min(self.num_steps, self.config.train.max_steps or self.num_steps)
        train = replace(self.config.train, max_steps=num_steps)
        run = build_run(replace(self.config, train=train, evaluate=EvaluateConfig()), world, self.task)
        engine, seconds, values, begin = Engine(run), 0.0, dict[str, float](), time.perf_counter()
        for report in engine.steps():
            if engine.ends_with(report.step):
                run.phases.take()()  # waits for the device
                seconds = time.perf_counter() - begin
                if run.evaluation is not None:
                    run.enter_weights(report.step)
                    with run.evaluation_weights():
                        values, _ = run.evaluation.run()
        with run.evaluation_weights():
            model = digest_of(run.training.model)
        return asdict(Trained(engine.next_step, seconds, values, model))
