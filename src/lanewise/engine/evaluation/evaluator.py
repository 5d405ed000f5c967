"""Evaluates a model on each sample exactly once, with the same result on any number of processes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from lanewise.data import LaneBatch, LaneReader, read_turns
from lanewise.device.accelerator import has_streams
from lanewise.engine.buffers.pack import evaluating
from lanewise.engine.step.lane import LaneRunner, TaskLane, named_lane, to_device
from lanewise.errors import DataError, PreemptedError, TaskError, noting
from lanewise.lanes import Placement, SequentialSchedule, metric_seed
from lanewise.metrics import MetricStates, check_metrics, merge_metrics, take_states
from lanewise.nested import map_leaves
from lanewise.random_state import set_random_state
from lanewise.reduce import Reducer, evaluate_lanes
from lanewise.watch.heartbeat import EVALUATION, heartbeat
from lanewise.world.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric

T = TypeVar("T")

_STOPPED = (
    "a signal stopped the evaluation on the dataset {}. With --resume the run begins with this evaluation."
)


@dataclass(frozen=True)
class EvalSet:
    """A named dataset to evaluate on."""

    name: str
    reader: LaneReader
    schedule: SequentialSchedule
    has_metrics: bool = True
    """Whether the task's metrics accept the batches of this set; if not, only the loss is evaluated."""


class _LaneResult(NamedTuple):
    """Results of one lane."""

    losses: list[tuple[float, float]]
    """The loss sum and the weight of each micro-batch."""
    states: MetricStates


@dataclass
class Evaluator:
    """Evaluates the task's eval datasets, each of which is cut into one range of samples for each lane."""

    lanes: LaneRunner
    """Runs the lanes of the user's task."""
    model: nn.Module
    """The user's module, on the world's device."""
    sets: Sequence[EvalSet]
    """The datasets to evaluate on."""
    world: World
    """The processes."""
    placement: Placement
    """Which process carries which lanes."""
    num_workers: int = 0
    """Number of loader processes."""
    reducer: Reducer | None = None
    """The reducer that holds the model during training, whose forwards may be collective; None outside of
    training."""

    def __post_init__(self) -> None:
        metrics = {eval_set.name: self._metrics_for(eval_set) for eval_set in self.sets}
        for of_set in metrics.values():
            check_metrics(of_set)
        self.keys = [f"{name}/{key}" for name, of_set in metrics.items() for key in ("loss", *of_set)]
        """Names of the values that `run` returns; a metric with several values has names `key/name` there."""

    def run(self, wants_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Evaluate on all sets. Collective: every rank must call this.

        Args:
            wants_stop: tells whether this process was asked to stop; called before each micro-batch. Where
                forwards are collective, no rank may skip one, so the evaluation stops between two sets only.

        Returns:
            The values of `set/loss` and `set/metric`; the same on every rank, for any number of processes.

        Raises:
            PreemptedError: on every rank, if one rank was asked to stop before the evaluation was complete.
        """
        values: dict[str, float] = {}
        stops = False
        for eval_set in self.sets:
            if stops:
                raise PreemptedError(_STOPPED.format(eval_set.name))
            local: dict[int, _LaneResult] | None = None
            with suppress(PreemptedError), _eval_mode(self.model), torch.no_grad():
                local = self._run_lanes(eval_set, wants_stop)
            lanes: dict[int, _LaneResult] = {}
            for rank_lanes, rank_stops in self.world.all_gather_object((local, wants_stop())):
                if rank_lanes is None:
                    raise PreemptedError(_STOPPED.format(eval_set.name))
                lanes |= rank_lanes
                stops |= rank_stops
            values |= {f"{eval_set.name}/{key}": value for key, value in self._merge(eval_set, lanes).items()}
        return values

    def predict(self, name: str) -> list[Any]:
        """Compute the outputs on one set. Collective: every rank must call this.

        Returns:
            On rank 0 the outputs of `Task.forward`, one for each sample, on the CPU, in dataset order; an
            empty list on other ranks.

        Raises:
            TaskError: if there is no such dataset, or an output does not have one entry for each sample.
            DataError: if a sample cannot be read.
        """
        sets = {one.name: one for one in self.sets}
        if name not in sets:
            raise TaskError(f"the task has no eval dataset {name}. Use one of {', '.join(sets)}.")
        local: list[Any] = []
        with _eval_mode(self.model), torch.no_grad():
            for lane, outputs in self._compute(sets[name], lambda lane, data: lane.forward(self.model, data)):
                with named_lane(lane.batch):
                    local += _split(outputs, lane.batch.num_samples)
        due = sum(len(turn.positions) for turn in sets[name].schedule.turns(self.placement.own))
        if len(local) != due:
            raise DataError(
                f"{due - len(local)} of {due} samples of the eval dataset {name} cannot be read, and a "
                "prediction is for every sample. Mend the files."
            )
        gathered = self.world.gather_object(local)
        # The samples of a lane are contiguous, and so are the lanes of a process.
        return [] if gathered is None else [output for outputs in gathered for output in outputs]

    def _run_lanes(self, eval_set: EvalSet, wants_stop: Callable[[], bool]) -> dict[int, _LaneResult]:
        """Evaluate the samples of this process's lanes; return the result of each lane.

        Raises:
            PreemptedError: if this process was asked to stop, and may stop without the others.
        """

        def outputs_and_loss(lane: TaskLane, data: Any) -> tuple[Any, Any]:
            outputs = lane.forward(self.model, data)
            return outputs, lane.loss(outputs, data)

        results: dict[int, _LaneResult] = {}
        computed = self._compute(eval_set, outputs_and_loss, wants_stop)
        for number, micro_batches in groupby(computed, lambda pair: pair[0].turn.lane):
            metrics = {key: m.to(self.world.device) for key, m in self._metrics_for(eval_set).items()}
            losses = []
            for lane, (outputs, returned) in micro_batches:
                with named_lane(lane.batch):
                    loss = lane.check(returned)
                    if eval_set.has_metrics:
                        self.lanes.task.update_metrics(metrics, outputs, lane.data)
                    losses.append((0.0 if loss.sum is None else loss.sum.item(), loss.weight))
            results[number] = _LaneResult(losses, take_states(metrics))
        return results

    def _compute(
        self,
        eval_set: EvalSet,
        compute: Callable[[TaskLane, Any], T],
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[TaskLane, T]]:
        """Yield for each micro-batch of this process its lane and the result of `compute`."""
        batches = read_in_order(
            eval_set.reader,
            eval_set.schedule,
            self.placement.own,
            self.world.device,
            num_workers=self.num_workers,
        )

        may_stop_alone = self.reducer is None or not self.reducer.forward_is_collective

        def lane_of(batch: LaneBatch) -> TaskLane:
            heartbeat.note = (EVALUATION, heartbeat.step, batch.turn.lane)
            if may_stop_alone and wants_stop():
                raise PreemptedError(_STOPPED.format(eval_set.name))
            return self.lanes.evaluation_lane(batch)

        num_lanes = sum(1 for turn in eval_set.schedule.turns(self.placement.own) if turn.positions)
        evaluate = evaluate_lanes if self.reducer is None else self.reducer.evaluate
        return evaluate(self.model, map(lane_of, batches), num_lanes, compute)

    def _metrics_for(self, eval_set: EvalSet) -> Mapping[str, "Metric"]:
        return self.lanes.task.build_metrics() if eval_set.has_metrics else {}

    def _merge(self, eval_set: EvalSet, lanes: Mapping[int, _LaneResult]) -> dict[str, float]:
        """Merge the results of all lanes, in lane order."""
        in_order = [lanes[lane] for lane in sorted(lanes)]
        losses = [loss for lane in in_order for loss in lane.losses]
        loss_sums, weight = [loss_sum for loss_sum, _ in losses], math.fsum(weight for _, weight in losses)
        is_finite = all(map(math.isfinite, loss_sums)) and weight > 0
        loss = math.fsum(loss_sums) / weight if is_finite else math.nan
        # The lanes drew different random numbers on each process.
        set_random_state(metric_seed(self.lanes.seed, eval_set.name))
        with noting(lambda: f"when the metrics of eval dataset {eval_set.name} were computed"):
            metrics = merge_metrics(self._metrics_for(eval_set), [lane.states for lane in in_order])
        return {"loss": loss, **metrics}


def read_in_order(
    reader: LaneReader,
    schedule: SequentialSchedule,
    lanes: range,
    device: torch.device,
    *,
    num_workers: int,
) -> Iterator[LaneBatch]:
    """Yield the micro-batches of this process's lanes; one empty micro-batch if they have no samples.

    Args:
        reader: reads the dataset.
        schedule: cuts the dataset into one range for each lane.
        lanes: the lanes of this process.
        device: the device to which batches are moved.
        num_workers: number of loader processes. For a dataset in blocks at most one is used, since each of
            several would read all blocks.
    """
    if hasattr(reader.dataset, "block_sizes"):
        num_workers = min(num_workers, 1)
    turns = ((turn, tuple(turn.positions)) for turn in schedule.turns(lanes))
    batches = read_turns(reader, turns, num_workers, pin_memory=has_streams(device))
    yield from to_device(batches, device)


def _split(outputs: Any, num_samples: int) -> list[Any]:
    """Split the outputs of a micro-batch, in any nested containers, into one for each sample."""

    def on_cpu(leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (num_samples,):
            got = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise TaskError(
                f"an output of the model does not have one entry for each of the {num_samples} samples: "
                f"got {got}. Return from forward tensors whose first dimension is the samples."
            )
        return leaf.cpu()

    def of_sample(number: int) -> Any:
        # A copy, as a view is sent to the other processes with the whole micro-batch.
        return map_leaves(lambda leaf: leaf[number].clone(), of_all)

    of_all = map_leaves(on_cpu, outputs)
    return list(map(of_sample, range(num_samples)))


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards back into its own mode, with its own buffers.

    A module may update statistics during an evaluation too. Without the restored buffers, these statistics,
    which depend on the layout, would affect the training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with evaluating([model]):
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training
