"""Evaluates a model on exactly the samples that exist, with the same result on any number of processes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lanewise.config import Mode
from lanewise.data import LaneBatch, LaneReader, map_leaves, read_turns
from lanewise.engine.lane import LaneLoss, named_lane, to_device
from lanewise.errors import ConfigError, PreemptedError, TaskError, noting
from lanewise.lanes import BlockSchedule, evaluation_seed, lane_blocks
from lanewise.metrics import MetricStates, check_metrics, merge_metrics, take_states
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.reduce import Reducer, evaluating
from lanewise.task import Task
from lanewise.world.accelerator import has_streams
from lanewise.world.world import World

T = TypeVar("T")

_STOPPED = "a signal stopped the evaluation on the dataset {}. With --resume it is made first."


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
        seed: seed of the run.
        num_workers: loader processes.
        reducer: what has the model, where it is being trained: a forward may be collective then.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        sets: list[EvalSet],
        world: World,
        *,
        seed: int,
        num_workers: int = 0,
        reducer: Reducer | None = None,
    ) -> None:
        self._task = task
        self._reducer = reducer
        self._is_collective = reducer is not None and reducer.forward_is_collective
        self._model = model
        self._precision = precision
        self._world = world
        self._seed = seed
        self._num_workers = num_workers
        self._sets = sets
        metrics = task.build_metrics()
        check_metrics(metrics)
        self.keys = [f"{eval_set.name}/{name}" for eval_set in sets for name in ("loss", *metrics)]
        """What `run` gives; a metric with several values gives several, `key/name`."""

    def run(self, wants_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Evaluate on all sets. Collective: every rank must call this.

        Args:
            wants_stop: tells whether this process was asked to stop; looked at before each micro-batch. Where
                a forward is collective, no rank may leave out one: then it counts between two sets only.

        Returns:
            `set/loss` and `set/metric`; equal on every rank, for any number of processes.

        Raises:
            PreemptedError: on every rank, if one was asked to stop before it was done.
        """
        values: dict[str, float] = {}
        stops = False
        for eval_set in self._sets:
            if stops:
                raise PreemptedError(_STOPPED.format(eval_set.name))
            with _eval_mode(self._model), torch.no_grad():
                own = self._run_lanes(eval_set, wants_stop)
            lanes: dict[int, _LaneResult] = {}
            for rank_lanes, rank_stops in self._world.all_gather_object((own, wants_stop())):
                if rank_lanes is None:
                    raise PreemptedError(_STOPPED.format(eval_set.name))
                lanes |= rank_lanes
                stops |= rank_stops
            values |= {f"{eval_set.name}/{key}": value for key, value in self._merge(eval_set, lanes).items()}
        return values

    def predict(self, name: str) -> list[Any]:
        """Compute the outputs on one set. Collective: every rank must call this.

        Returns:
            On rank 0 what `Task.forward` gives for each sample, on the CPU, in dataset order; elsewhere
            nothing.

        Raises:
            TaskError: if there is no such set, or an output is not one for each sample.
        """
        sets = {eval_set.name: eval_set for eval_set in self._sets}
        if name not in sets:
            raise TaskError(f"the task has no eval dataset {name}. Use one of {', '.join(sets)}.")
        own: list[Any] = []
        with _eval_mode(self._model), torch.no_grad():
            for batch in self._batches(sets[name]):
                with named_lane(batch):
                    with self._precision.forward():
                        outputs = self._task.forward(self._model, batch.data)
                    own += _split(outputs, len(batch.indices))
        gathered = self._world.gather_object(own)
        # Blocks of lanes are contiguous, and so are the lanes of a process.
        return [] if gathered is None else [output for outputs in gathered for output in outputs]

    def _run_lanes(self, eval_set: EvalSet, wants_stop: Callable[[], bool]) -> dict[int, _LaneResult] | None:
        """Evaluate the blocks of this process's lanes; None if it was asked to stop before the end."""
        results: dict[int, _LaneResult] = {}
        what = f"the loss of {type(self._task).__name__}"
        for batch in self._batches(eval_set):
            if not self._is_collective and wants_stop():
                return None
            turn = batch.turn
            with named_lane(batch):
                outputs, returned = self._run(partial(self._forward, batch))
            if turn.borrowed:
                continue
            with named_lane(batch):
                if turn.lane not in results:
                    results[turn.lane] = _LaneResult()
                    metrics = {key: m.to(self._world.device) for key, m in self._task.build_metrics().items()}
                loss = LaneLoss.check(returned, len(batch.indices), what)
                self._task.update_metrics(metrics, outputs, batch.data)
                result = results[turn.lane]
                result.loss_sums.append(0.0 if loss.sum is None else loss.sum.item())
                result.weights.append(loss.weight)
                if turn.is_last:
                    result.states = take_states(metrics)
        return results

    def _forward(self, batch: LaneBatch) -> tuple[Any, Any]:
        with self._precision.forward():
            outputs = self._task.forward(self._model, batch.data)
            return outputs, self._task.loss(outputs, batch.data)

    def _run(self, function: Callable[[], T]) -> T:
        return function() if self._reducer is None else self._reducer.call(self._model, function)

    def _batches(self, eval_set: EvalSet) -> Iterator[LaneBatch]:
        return read_blocks(
            eval_set.reader,
            eval_set.schedule,
            self._world,
            self._seed,
            num_workers=self._num_workers,
            is_collective=self._is_collective,
        )

    def _merge(self, eval_set: EvalSet, lanes: Mapping[int, _LaneResult]) -> dict[str, float]:
        """Fold what all lanes found, in lane order."""
        in_order = [lanes[lane] for lane in sorted(lanes)]
        loss_sums = [loss_sum for lane in in_order for loss_sum in lane.loss_sums]
        weight = math.fsum(weight for lane in in_order for weight in lane.weights)
        is_finite = all(map(math.isfinite, loss_sums)) and weight > 0
        loss = math.fsum(loss_sums) / weight if is_finite else math.nan
        with noting(lambda: f"when the metrics of eval dataset {eval_set.name} were computed"):
            metrics = merge_metrics(self._task.build_metrics(), [lane.states for lane in in_order])
        return {"loss": loss, **metrics}


def read_blocks(
    reader: LaneReader,
    schedule: BlockSchedule,
    world: World,
    seed: int,
    *,
    num_workers: int,
    is_collective: bool = False,
) -> Iterator[LaneBatch]:
    """Yield the blocks of this process's lanes, each micro-batch under a random state of its own.

    Args:
        reader: reads the dataset.
        schedule: cuts it into blocks.
        world: the processes; batches are put on its device.
        seed: seed of the run.
        num_workers: loader processes.
        is_collective: whether a forward is, so that every process needs equally many batches.
    """
    blocks = lane_blocks(schedule.num_lanes, world.world_size)
    own = schedule.turns(blocks[world.rank], as_many_as=blocks[0] if is_collective else None)
    turns = ((turn, tuple(turn.borrowed or turn.positions)) for turn in own)
    batches = read_turns(reader, turns, num_workers, pin_memory=has_streams(world.device))
    for batch in to_device(batches, world.device):
        set_random_state(evaluation_seed(seed, batch.turn.step, batch.turn.lane))
        yield batch


def _split(outputs: Any, num_samples: int) -> list[Any]:
    """Cut the outputs of a micro-batch into one for each sample, whatever containers they are in."""

    def take(sample: int) -> Callable[[Any], Any]:
        def take_from(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (num_samples,):
                got = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise TaskError(
                    f"an output of the model is not one for each of the {num_samples} samples: got {got}. "
                    "Return from forward what has the samples as its first dimension."
                )
            return leaf[sample].cpu()

        return take_from

    return [map_leaves(take(sample), outputs) for sample in range(num_samples)]


class Evaluation:
    """When to evaluate while training, and which of the results is the best so far.

    Args:
        evaluator: evaluates.
        every_steps: steps from one evaluation to the next; the last step of the run is always one.
        last_step: the step before which training ends.
        best: key of the value by which models are compared; None compares none.
        best_mode: whether more of it is better, or less.

    Raises:
        ConfigError: if surely no evaluation gives that value.
    """

    def __init__(
        self, evaluator: Evaluator, every_steps: int, last_step: int, best: str | None, best_mode: Mode
    ) -> None:
        self._evaluator = evaluator
        self._every_steps = every_steps
        self._last_step = last_step
        self._best = best
        self.sign = 1 if best_mode == "max" else -1
        self.best_value = -math.inf
        """The best value so far, times -1 where less is better."""
        self.last_values: dict[str, float] = {}
        """What the last evaluation gave; empty before it."""
        self.is_due = False
        """Whether a step that was taken has an evaluation after it that was not made yet."""
        # A metric may have several values, whose names its first evaluation tells.
        if best is not None and not any(
            best == key or (best.startswith(f"{key}/") and not key.endswith("/loss"))
            for key in evaluator.keys
        ):
            raise _no_such_value(best, evaluator.keys)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"best": self.best_value, "last": self.last_values, "is_due": self.is_due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: if it is none.
        """
        best, last, is_due = state["best"], state["last"], state["is_due"]
        if not all(isinstance(key, str) and type(value) in (int, float) for key, value in last.items()):
            raise ValueError(f"an evaluation gave {last!r:.100}")
        if not isinstance(best, float) or not isinstance(is_due, bool) or len(state) > 3:
            raise ValueError(f"an evaluation has no state {state!r:.100}")
        self.best_value = -math.inf if math.isnan(best) else best
        self.last_values, self.is_due = dict(last), is_due

    def forget_best(self) -> None:
        """Look for the best value anew, as it was of another metric, or the other way round."""
        self.best_value = -math.inf

    @property
    def last_value(self) -> float | None:
        """The value that the last evaluation gave; None before it, and where none is compared."""
        return None if self._best is None else self.last_values.get(self._best)

    def note_step(self, step: int) -> None:
        """Learn that a step was taken, after which an evaluation may be due."""
        self.is_due = (step + 1) % self._every_steps == 0 or step + 1 == self._last_step

    def run(self, wants_stop: Callable[[], bool] = lambda: False) -> tuple[dict[str, float], bool]:
        """Evaluate, and tell whether this is the best so far. Collective: every rank must call this.

        All ranks have the same values, so they decide alike without asking each other.

        Args:
            wants_stop: see `Evaluator.run`.

        Raises:
            PreemptedError: on every rank, if one was asked to stop; the evaluation is still due then.
            ConfigError: if no value is called as the one to compare by; it is still due then as well.
        """
        values = self._evaluator.run(wants_stop)
        if self._best is not None and self._best not in values:
            raise _no_such_value(self._best, values)
        self.is_due = False
        self.last_values = values
        if self._best is None:
            return values, False
        value = self.sign * values[self._best]
        is_best = value > self.best_value  # never for a NaN
        if is_best:
            self.best_value = value
        return values, is_best


def _no_such_value(best: str, keys: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"evaluate.best must be a value of an evaluation: got {best}. "
        f"Use one of {', '.join(keys) or '(the task has no eval_datasets)'}."
    )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards each back into its own, with its buffers.

    A module that keeps statistics in evaluation as well would carry them into the training of one layout, and
    other ones into that of another.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with evaluating([model]):
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training
