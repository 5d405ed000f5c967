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
from lanewise.nested import map_leaves, plain, structure, tensors_in
from lanewise.random_state import set_random_state
from lanewise.reduce import Reducer, evaluate_lanes
from lanewise.task import Task
from lanewise.watch.heartbeat import EVALUATION, heartbeat
from lanewise.world.encode import TensorTable, encode
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

    losses: torch.Tensor
    """The loss sum and the weight of each micro-batch: float64, as it is sent faster than a list."""
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
        task = type(self.lanes.task)
        updates = any(one.has_metrics for one in self.sets) and task.update_metrics is not Task.update_metrics
        if task.update_metrics is Task.update_metrics:
            for of_set in metrics.values():
                self.lanes.task.update_metrics(of_set, None, None)  # raises where there are metrics
        if updates and not any(metrics.values()):
            raise TaskError(
                f"{task.__name__} has update_metrics, and its build_metrics returns no metric to update. "
                "Return metrics by name from build_metrics, or leave update_metrics out."
            )
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
            for rank_lanes, rank_stops in self.world.all_gather_tree((local, wants_stop())):
                if rank_lanes is None:
                    raise PreemptedError(_STOPPED.format(eval_set.name))
                lanes |= {lane: _LaneResult(*result) for lane, result in rank_lanes.items()}
                stops |= rank_stops
            values |= {f"{eval_set.name}/{key}": value for key, value in self._merge(eval_set, lanes).items()}
        return values

    @property
    def only_set(self) -> str:
        """The name of the only set.

        Raises:
            TaskError: if there are several.
        """
        if len(self.sets) > 1:
            names = ", ".join(one.name for one in self.sets)
            raise TaskError(f"the task has several eval datasets. Name one of {names} (--dataset).")
        return self.sets[0].name

    def predict(self, name: str) -> list[Any]:
        """Compute the outputs on one set. Collective: every rank must call this.

        Returns:
            On rank 0 what `Task.predict` made of the outputs, one for each sample, on the CPU, in dataset
            order; an empty list on other ranks.

        Raises:
            TaskError: if there is no such dataset, an output does not have one entry for each sample, or it
                is of a kind that cannot be sent to rank 0.
            DataError: if a sample cannot be read.
        """
        sets = {one.name: one for one in self.sets}
        if name not in sets:
            raise TaskError(f"the task has no eval dataset {name}. Use one of {', '.join(sets)}.")
        local: list[_Outputs] = []
        with _eval_mode(self.model), torch.no_grad():
            for lane, outputs in self._compute(sets[name], lambda lane, data: lane.forward(self.model, data)):
                with named_lane(lane.batch):
                    chosen = self.lanes.task.predict(outputs, lane.data)
                    local.append(_take(chosen, lane.batch.num_samples))
        due = sum(len(turn.positions) for turn in sets[name].schedule.turns(self.placement.own))
        if num_lost := due - sum(one.num_samples for one in local):
            raise DataError(
                f"{num_lost} of {due} samples of the eval dataset {name} cannot be read, and a "
                "prediction is for every sample. Mend the files."
            )
        gathered = self.world.gather_tree([(one.num_samples, one.form, plain(one.values)) for one in local])
        # The samples of a lane are contiguous, and so are the lanes of a process.
        others = [_Outputs(*one) for of_rank in (gathered or [])[1:] for one in of_rank]
        containers = {one.form: one.values for one in local}
        everything = [*local, *(_put_into(containers, one) for one in others)] if gathered else []
        return [output for one in everything for output in one.split()]

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
            results[number] = _LaneResult(torch.tensor(losses, dtype=torch.float64), take_states(metrics))
        return results

    def _compute(
        self,
        eval_set: EvalSet,
        compute: Callable[[TaskLane, Any], T],
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[TaskLane, T]]:
        """Yield for each micro-batch of this process its lane and the result of `compute`."""
        may_stop_alone = self.reducer is None or not self.reducer.forward_is_collective
        batches = read_in_order(
            eval_set.reader,
            eval_set.schedule,
            self.placement.own,
            self.world.device,
            num_workers=self.num_workers,
            fills_empty=not may_stop_alone,
        )

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
        losses = [loss for lane in in_order for loss in lane.losses.tolist()]
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
    fills_empty: bool = False,
) -> Iterator[LaneBatch]:
    """Yield the micro-batches of this process's lanes; one empty micro-batch if they have no samples.

    Args:
        reader: reads the dataset.
        schedule: cuts the dataset into one range for each lane.
        lanes: the lanes of this process.
        device: the device to which batches are moved.
        num_workers: number of loader processes. For a dataset in blocks at most one is used, since each of
            several would read all blocks.
        fills_empty: whether an empty micro-batch gets the data of the first one of lane 0, for a forward that
            does not count.
    """
    if hasattr(reader.dataset, "block_sizes"):
        num_workers = min(num_workers, 1)
    spare = next(schedule.turns(range(1))).positions if fills_empty else ()
    turns = ((turn, tuple(turn.positions or spare)) for turn in schedule.turns(lanes))
    batches = read_turns(reader, turns, num_workers, pin_memory=has_streams(device))
    yield from to_device(batches, device)


class _Outputs(NamedTuple):
    """What the forward returned for a micro-batch, on the CPU."""

    num_samples: int
    form: str
    """What `structure` says of it."""
    values: Any

    def split(self) -> list[Any]:
        """Return the outputs of each sample."""

        def of_sample(number: int) -> Any:
            # A copy, as a view would keep the whole micro-batch.
            return map_leaves(lambda leaf: leaf[number].clone(), self.values)

        return list(map(of_sample, range(self.num_samples)))


def _take(outputs: Any, num_samples: int) -> _Outputs:
    """Take the outputs of a micro-batch, in any nested containers, to the CPU.

    Raises:
        TaskError: if one does not have an entry for each sample, or cannot be sent to another process.
    """

    def on_cpu(leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (num_samples,):
            got = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise TaskError(
                f"an output of the model does not have one entry for each of the {num_samples} samples: "
                f"got {got}. Choose those that have by Task.predict."
            )
        return leaf.cpu()

    of_all = map_leaves(on_cpu, outputs)
    encode(plain(of_all), "outputs", TensorTable(TaskError, "predicted"))  # which refuses anything else
    return _Outputs(num_samples, structure(of_all), of_all)


def _put_into(containers: Mapping[str, Any], outputs: _Outputs) -> _Outputs:
    """Put outputs of another process, which arrived in dicts, lists and tuples, into our own containers.

    Raises:
        TaskError: if they were in other containers, and no outputs of this process were in such ones.
    """
    if structure(outputs.values) == outputs.form:  # they were dicts, lists and tuples
        return outputs
    if outputs.form not in containers:
        raise TaskError(
            f"some outputs of the model are in other containers than those of rank 0: {outputs.form:.200}. "
            "Return the same containers for every micro-batch, or dicts, lists and tuples."
        )
    tensors = tensors_in(outputs.values)
    return outputs._replace(values=map_leaves(lambda _: next(tensors), containers[outputs.form]))


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
