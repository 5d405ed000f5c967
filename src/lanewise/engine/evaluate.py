"""Evaluates a model on exactly the samples that exist, with the same result on any number of processes."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from lanewise.config import Mode
from lanewise.data import LaneReader, read_turns
from lanewise.engine.lane import LaneLoss, to_device
from lanewise.errors import ConfigError
from lanewise.lanes import BlockSchedule, evaluation_seed, lane_blocks
from lanewise.metrics import MetricStates, check_metrics, merge_metrics, take_states
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.task import Task
from lanewise.world.world import World


@dataclass(frozen=True)
class EvalSet:
    """A named dataset to evaluate on."""

    name: str
    reader: LaneReader
    schedule: BlockSchedule


@dataclass
class _LaneResult:
    """What one lane found in its block."""

    loss_sums: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    states: MetricStates = field(default_factory=dict)


class Evaluator:
    """Evaluates the task's eval datasets, each of them cut into one block for each lane.

    Args:
        task: the user's task.
        model: the user's module, on the world's device.
        precision: the number format of forward and loss.
        sets: what to evaluate on.
        world: the processes.
        num_lanes: lanes of the run.
        seed: seed of the run.
        num_workers: loader processes.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        sets: list[EvalSet],
        world: World,
        *,
        num_lanes: int,
        seed: int,
        num_workers: int = 0,
    ) -> None:
        self._task = task
        self._model = model
        self._precision = precision
        self._world = world
        self._lanes = lane_blocks(num_lanes, world.world_size)[world.rank]
        self._seed = seed
        self._num_workers = num_workers
        self._sets = sets
        metrics = task.build_metrics()
        check_metrics(metrics)
        self.keys = [f"{eval_set.name}/{name}" for eval_set in sets for name in ("loss", *metrics)]
        """What `run` gives; a metric with several values gives several, `key/name`."""

    def run(self) -> dict[str, float]:
        """Evaluate on all sets. Collective: every rank must call this.

        Returns:
            `set/loss` and `set/metric`; equal on every rank, for any number of processes.
        """
        values: dict[str, float] = {}
        for eval_set in self._sets:
            with _eval_mode(self._model), torch.no_grad():
                own = self._run_lanes(eval_set)
            lanes: dict[int, _LaneResult] = {}
            for rank_lanes in self._world.all_gather_object(own):
                lanes |= rank_lanes
            values |= {f"{eval_set.name}/{key}": value for key, value in self._merge(lanes).items()}
        return values

    def _run_lanes(self, eval_set: EvalSet) -> dict[int, _LaneResult]:
        """Evaluate the blocks of this process's lanes."""
        results: dict[int, _LaneResult] = {}
        turns = eval_set.schedule.turns(self._lanes)
        indexed = ((turn, tuple(turn.positions)) for turn in turns)
        for batch in read_turns(eval_set.reader, indexed, self._num_workers):
            turn = batch.turn
            if turn.lane not in results:
                result = results[turn.lane] = _LaneResult()
                metrics = {name: m.to(self._world.device) for name, m in self._task.build_metrics().items()}
            set_random_state(evaluation_seed(self._seed, turn.step, turn.lane))
            data = to_device(batch.data, self._world.device)
            with self._precision.forward():
                outputs = self._task.forward(self._model, data)
                loss = LaneLoss.compute(self._task, outputs, data, len(batch.indices))
            result.loss_sums.append(0.0 if loss.sum is None else loss.sum.item())
            result.weights.append(loss.weight)
            self._task.update_metrics(metrics, outputs, data)
            if turn.is_last:
                result.states = take_states(metrics)
        return results

    def _merge(self, lanes: Mapping[int, _LaneResult]) -> dict[str, float]:
        """Fold what all lanes found, in lane order."""
        in_order = [lanes[lane] for lane in sorted(lanes)]
        loss_sums = [loss_sum for lane in in_order for loss_sum in lane.loss_sums]
        weight = math.fsum(weight for lane in in_order for weight in lane.weights)
        is_finite = all(map(math.isfinite, loss_sums)) and weight > 0
        loss = math.fsum(loss_sums) / weight if is_finite else math.nan
        return {"loss": loss, **merge_metrics(self._task.build_metrics(), [lane.states for lane in in_order])}


class Evaluation:
    """When to evaluate while training, and which of the results is the best so far.

    Args:
        evaluator: evaluates.
        every_steps: steps from one evaluation to the next; the last step of the run is always one.
        last_step: the step before which training ends.
        best: key of the value by which models are compared; None compares none.
        best_mode: whether more of it is better, or less.

    Raises:
        ConfigError: if no evaluation gives that value.
    """

    def __init__(
        self, evaluator: Evaluator, every_steps: int, last_step: int, best: str | None, best_mode: Mode
    ) -> None:
        self._evaluator = evaluator
        self._every_steps = every_steps
        self._last_step = last_step
        self._best = best
        self._sign = 1 if best_mode == "max" else -1
        self._best_value = -math.inf
        if best is not None and not any(best == key or best.startswith(f"{key}/") for key in evaluator.keys):
            raise ConfigError(
                f"evaluate.best must be a value of an evaluation: got {best}. "
                f"Use one of {', '.join(evaluator.keys) or '(the task has no eval_datasets)'}."
            )

    def is_due_after(self, step: int) -> bool:
        """Tell whether to evaluate after this step."""
        return (step + 1) % self._every_steps == 0 or step + 1 == self._last_step

    def run(self) -> tuple[dict[str, float], bool]:
        """Evaluate, and tell whether this is the best so far. Collective: every rank must call this.

        All ranks have the same values, so they decide alike without asking each other.
        """
        values = self._evaluator.run()
        if self._best is None:
            return values, False
        value = self._sign * values[self._best]
        is_best = value > self._best_value
        self._best_value = max(value, self._best_value)
        return values, is_best


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards each back into its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
