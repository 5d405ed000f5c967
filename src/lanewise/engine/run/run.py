"""The parts of a run on one process."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lanewise.config import ALONE, RunConfig
from lanewise.data import LaneSource
from lanewise.engine.evaluation.evaluation import Evaluation
from lanewise.engine.run.optimizer import evaluation_weights
from lanewise.engine.run.scheduler import Plateau
from lanewise.engine.run.summary import summarize
from lanewise.engine.state.optimizer_shards import OptimizerShards
from lanewise.engine.state.run_state import RunState
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.metrics import LogInterval
from lanewise.engine.step.phases import Phases
from lanewise.engine.step.update import Training
from lanewise.lanes import PROGRESS, Placement, RunLength, lane_ranges
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The parts of a run. A checkpoint is restored into them; then an `Engine` trains them."""

    config: RunConfig
    world: World
    placement: Placement
    """Which process carries which lanes."""
    runner: LaneRunner
    """Runs the lanes of the task."""
    training: Training
    plateau: Plateau | None
    """Changes the learning rate after each evaluation."""
    shards: OptimizerShards | None
    """Which process updates which parameter; None: each process updates all of them."""
    reducer: Reducer
    """Holds the model, and sums its gradients."""
    phases: Phases
    """Measures the phases of a step; the reducer calls it inside the backward."""
    loader: LaneSource
    """Yields the batches of this process's lanes."""
    evaluation: Evaluation | None
    """When and on what to evaluate; None where the task has no eval datasets."""
    log_interval: LogInterval
    """Which steps are logged."""
    last_step: int | None
    """The step before which training ends; None where only the data tells, as a stream of some epochs."""
    identity: dict[str, Any]
    """The identity of the run: a checkpoint with another identity is of another run."""
    state: RunState
    """The state that a checkpoint of the run holds; made when the model was new."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Give the model the weights that are evaluated, and written as the model; see `optimizer.py`.

        Collective: every rank must enter it.
        """
        return evaluation_weights(self.training.optimizer, self.shards)

    @property
    def length(self) -> RunLength:
        """How many steps it has, and whether the user's code asked for it on this process."""
        assert self.loader.reader.length is not None
        return self.loader.reader.length

    def note_length(self) -> None:
        """Make the length of the run a part of its identity, on which all that asked for it depends."""
        self.identity["num_steps"] = "as many as the stream has" if self.last_step is None else self.last_step

    def enter_weights(self, step: int) -> None:
        """Set the progress to that of the weights after a step, with a length of which nothing is noted."""
        epoch = 0 if step < 0 else self.loader.end_of(step).epoch
        PROGRESS.set((step + 1, epoch, RunLength(self.last_step)))

    def describe(self) -> None:
        """Log the numbers that were derived from the configuration, and what no optimizer step reaches."""
        world, num_replicas = self.world, len(self.reducer.replicas)
        parameters = list(self.training.model.parameters())
        num_devices = world.world_size * num_replicas
        lanes_each = sorted({len(lanes) for lanes in lane_ranges(self.placement.num_lanes, num_devices)})
        processes = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
        distributed = self.config.distributed
        num_samples, steps = "a stream", "until it ends" if self.last_step is None else f"{self.last_step:,}"
        if (schedule := self.loader.schedule) is not None:
            num_samples = f"{schedule.num_samples:,}"
            steps = f"{schedule.steps_per_epoch:,} in an epoch, {steps} in all"
        if (section := self.config.scheduler) and section.class_path and self.plateau is None:
            logger.info("the scheduler is stepped after each %s (scheduler.interval)", section.interval)
        trained = {name: one for name, one in self.training.model.named_parameters() if one.requires_grad}
        grouped = {one for group in self.training.optimizer.param_groups for one in group["params"]}
        ungrouped = {one: name for name, one in trained.items() if one not in grouped}
        if parts := summarize(self.training.model, ungrouped):
            logger.info("%s", parts)
        logger.info(
            "parameters: %s (%.4g MiB), trained: %s\n"
            "samples: %s, in steps of %s = %s lanes x %d; steps: %s\n"
            "%s on %s, reducer %s (%s); lanes each: %s; threads each: %d",
            f"{sum(parameter.numel() for parameter in parameters):,}",
            sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20,
            f"{sum(one.numel() for one in trained.values() if one in grouped):,}",
            num_samples,
            f"{self.config.batch.global_batch_size:,}",
            f"{self.placement.num_lanes:,}",
            self.config.batch.micro_batch_size,
            steps,
            processes if num_replicas == 1 else f"{num_replicas} devices in {processes}",
            world.device.type,
            distributed.reducer if num_devices > 1 else ALONE,
            distributed.equality,
            " or ".join(map(str, lanes_each)),
            distributed.threads,
        )
        if ungrouped:
            names = ", ".join(ungrouped.values())
            logger.warning("not trained, as in no group of the optimizer (add or freeze them): %.400s", names)
