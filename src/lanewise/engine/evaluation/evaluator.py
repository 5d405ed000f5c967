"""Evaluates a model on each sample exactly once, with the same result on any number of processes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from lanewise.config.better import mode_of
from lanewise.data import LaneBatch
from lanewise.engine.buffers.pack import evaluating
from lanewise.engine.evaluation.eval_set import EvalSet, no_sample
from lanewise.engine.evaluation.losses import Losses, merge_losses
from lanewise.engine.evaluation.prediction import Prediction, gather_predictions, take_prediction
from lanewise.engine.step.lane_error import named_lane
from lanewise.engine.step.lanes import LaneRunner, TaskLane
from lanewise.engine.step.outputs import LaneOutputs, gather_outputs
from lanewise.engine.step.terms import check_each
from lanewise.engine.step.whole_loss import task_loss
from lanewise.errors import DataError, PreemptedError, TaskError, noting
from lanewise.lanes import Placement, batch_loss_seed, metric_seed
from lanewise.metrics import MetricStates, check_metrics, merge_metrics, take_states
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.watch.heartbeat import EVALUATION, heartbeat
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer, evaluate_lanes
from lanewise.task import Task

if TYPE_CHECKING:
    from torchmetrics import Metric

T = TypeVar("T")

_STOPPED = (
    "a signal stopped the evaluation on the dataset {}. With --resume the run begins with this evaluation."
)


class _LaneResult(NamedTuple):
    """Results of one lane."""

    num_samples: int
    losses: Sequence[Mapping[str, torch.Tensor]]
    """What `Losses.sent` returned."""
    states: MetricStates


@dataclass
class _OpenLane:
    """What a lane has counted so far."""

    metrics: Mapping[str, "Metric"]
    num_samples: int = 0
    losses: Losses = field(default_factory=lambda: Losses({}, {}))

    def count(self, num_samples: int) -> None:
        """Add the samples of a micro-batch."""
        self.num_samples += num_samples

    def result(self) -> _LaneResult:
        """Return it, ready to be sent to other processes."""
        return _LaneResult(self.num_samples, self.losses.sent(), take_states(self.metrics))


@dataclass
class Evaluator:
    """Evaluates the task's eval datasets, each of which is cut into lanes."""

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
        by_key = {f"{name}/{key}": of_set[key] for name, of_set in metrics.items() for key in of_set}
        self.modes = {key: mode for key, metric in by_key.items() if (mode := mode_of(metric)) is not None}
        """Whether more or less is better of each metric that tells."""
        task = type(self.lanes.task)
        if task.update_metrics is Task.update_metrics:
            for of_set in metrics.values():
                self.lanes.task.update_metrics(of_set, None, None)  # raises where there are metrics
        elif self.sets and task.build_metrics is Task.build_metrics:
            raise TaskError(
                f"{task.__name__} has update_metrics, and no build_metrics whose metrics it could update. "
                "Return metrics by name from build_metrics, or leave update_metrics out."
            )
        is_whole = self.lanes.loss_method != "loss" and not self.lanes.has_eval_loss
        self._whole = task_loss(self.lanes) if is_whole else None
        self._gathers = task.eval_forward is not Task.eval_forward
        self.keys = [f"{name}/{key}" for name, of_set in metrics.items() for key in ("loss", *of_set)]
        """Names of the values that `run` returns, but for what a loss reports, which no one knows before; a
        metric with several values has names `key/name` there."""
        self.num_samples: dict[str, int] = {}
        """How many samples the last `run` evaluated, by set."""

    def run(self, wants_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Evaluate on all sets. Collective: every rank must call this.

        Args:
            wants_stop: tells whether this process was asked to stop; called before each micro-batch. Where
                forwards are collective, no rank may skip one, so the evaluation stops between two sets only.

        Returns:
            The values of `set/loss`, `set/metric` and what the loss reports; the same on every rank, for any
            number of processes.

        Raises:
            TaskError: if a metric of the loss and one of the task have the same name.
            PreemptedError: on every rank, if one rank was asked to stop before the evaluation was complete.
        """
        values: dict[str, float] = {}
        stops = False
        for eval_set in self.sets:
            if stops:
                raise PreemptedError(_STOPPED.format(eval_set.name))
            local: dict[int, _LaneResult] | None = None
            outputs: dict[int, list[LaneOutputs]] = {}
            whole = self.reducer.whole(self.model) if self.reducer and self._gathers else nullcontext()
            with suppress(PreemptedError), whole, eval_mode(self.model), torch.no_grad():
                local = self._run_lanes(eval_set, outputs, wants_stop)
            lanes: dict[int, _LaneResult] = {}
            for rank_lanes, rank_stops in self.world.all_gather_tree((local, wants_stop())):
                if rank_lanes is None:
                    raise PreemptedError(_STOPPED.format(eval_set.name))
                lanes |= {lane: _LaneResult(*result) for lane, result in rank_lanes.items()}
                stops |= rank_stops
            if not lanes:
                raise no_sample(eval_set.name)
            self.num_samples[eval_set.name] = sum(result.num_samples for result in lanes.values())
            losses = [lanes[lane].losses for lane in sorted(lanes)]
            if self._whole is not None:
                losses = self._batch_losses(eval_set, outputs)
            merged = self._merge(eval_set, lanes, losses)
            values |= {f"{eval_set.name}/{key}": value for key, value in merged.items()}
        return values

    @property
    def only_set(self) -> str:
        """The name of the only set.

        Raises:
            TaskError: if there are several.
        """
        if len(self.sets) > 1:
            names = ", ".join(eval_set.name for eval_set in self.sets)
            raise TaskError(f"the task has several eval datasets. Name one of {names} (--dataset).")
        return self.sets[0].name

    def predict(self, name: str) -> list[Any]:
        """Compute the outputs on one set. Collective: every rank must call this.

        Returns:
            On rank 0 what `Task.predict` made of the outputs, one for each sample, on the CPU, in dataset
            order, of a lane-aware stream lane after lane, and None for a sample that the dataset gave as
            None; an empty list on other ranks.

        Raises:
            TaskError: if there is no such dataset, an output does not have one entry for each sample, or it
                is of a kind that cannot be sent to rank 0.
            DataError: if a file dataset left out a sample.
        """
        sets = {eval_set.name: eval_set for eval_set in self.sets}
        if name not in sets:
            raise TaskError(f"the task has no eval dataset {name}. Use one of {', '.join(sets)}.")
        eval_set = sets[name]
        local: dict[tuple[int, int], Prediction] = {}
        missing: dict[tuple[int, int], Sequence[int]] = {}

        def note(batch: LaneBatch) -> None:
            if batch.missing:
                missing[eval_set.place(batch.turn)] = batch.missing

        with eval_mode(self.model), torch.no_grad():
            for lane, outputs in self._compute(
                eval_set, lambda lane, data: lane.forward(self.model, data), note=note
            ):
                with named_lane(lane.batch):
                    chosen = self.lanes.task.predict(outputs, lane.batch.data)
                    prediction = take_prediction(chosen, lane.batch.num_samples)
                local[eval_set.place(lane.batch.turn)] = prediction
        due = eval_set.num_samples(self.placement.own)
        num_read = sum(prediction.num_samples for prediction in local.values())
        num_read += sum(map(len, missing.values()))
        if due is not None and num_read < due:
            raise DataError(
                f"{due - num_read} of {due} samples of the eval dataset {name} cannot be read, and a "
                "prediction is for every sample. Mend the files."
            )
        return gather_predictions(local, missing, self.world)

    def _run_lanes(
        self, eval_set: EvalSet, outputs: dict[int, list[LaneOutputs]], wants_stop: Callable[[], bool]
    ) -> dict[int, _LaneResult]:
        """Evaluate the samples of this process's lanes; return the result of each lane.

        Where one loss is of all lanes, `outputs` gets what they returned, by the number of the micro-batch.

        Raises:
            PreemptedError: if this process was asked to stop, and may stop without the others.
        """

        def outputs_and_loss(lane: TaskLane, data: Any) -> tuple[Any, Any]:
            made = lane.forward(self.model, data)
            return made, lane.loss(made, data) if whole is None else whole.values(made, data)

        whole = self._whole
        lanes: dict[int, _OpenLane] = {}
        results: dict[int, _LaneResult] = {}
        for lane, (made, returned) in self._compute(eval_set, outputs_and_loss, wants_stop):
            number = lane.batch.turn.lane
            if number not in lanes:
                metrics = self._metrics_for(eval_set)
                lanes[number] = _OpenLane(
                    {key: metric.to(self.world.device) for key, metric in metrics.items()}
                )
            of_lane = lanes[number]
            of_lane.count(lane.batch.num_samples)
            with named_lane(lane.batch):
                if of_lane.metrics:
                    self.lanes.task.update_metrics(of_lane.metrics, made, lane.batch.data)
                if whole is not None:
                    outputs.setdefault(lane.batch.turn.step, []).append(
                        LaneOutputs(number, lane.batch.num_samples, returned)
                    )
                elif returned is not None or not self.lanes.has_eval_loss:
                    of_lane.losses.note(lane.check_each(returned))
            if lane.batch.turn.is_last:
                results[number] = lanes.pop(number).result()
        # What is left had no samples in its last micro-batch.
        return {**results, **{number: of_lane.result() for number, of_lane in lanes.items()}}

    def _compute(
        self,
        eval_set: EvalSet,
        compute: Callable[[TaskLane, Any], T],
        wants_stop: Callable[[], bool] = lambda: False,
        note: Callable[[LaneBatch], None] = lambda _: None,
    ) -> Iterator[tuple[TaskLane, T]]:
        """Yield for each micro-batch that has samples its lane and the result of `compute`; note all."""
        may_stop_alone = self._gathers or self.reducer is None or not self.reducer.forward_is_collective
        batches = eval_set.batches(
            self.placement.own,
            self.world.device,
            num_workers=self.num_workers,
            fills_empty=not may_stop_alone,
        )
        num_batches = eval_set.num_batches(self.placement.own)
        heartbeat.evaluated = (0, num_batches or 0)

        def lane_of(batch: LaneBatch) -> TaskLane:
            heartbeat.note = (EVALUATION, heartbeat.step, batch.turn.lane)
            heartbeat.evaluated = (heartbeat.evaluated[0] + 1, num_batches or 0)
            note(batch)
            if may_stop_alone and wants_stop():
                raise PreemptedError(_STOPPED.format(eval_set.name))
            return self.lanes.evaluation_lane(batch)

        evaluate = evaluate_lanes if self._gathers or self.reducer is None else self.reducer.evaluate
        return evaluate(self.model, map(lane_of, batches), num_batches, compute)

    def _metrics_for(self, eval_set: EvalSet) -> Mapping[str, "Metric"]:
        return self.lanes.task.build_metrics() if eval_set.has_metrics else {}

    def _batch_losses(
        self, eval_set: EvalSet, outputs: Mapping[int, Sequence[LaneOutputs]]
    ) -> list[Sequence[Mapping[str, torch.Tensor]]]:
        """Compute the losses of batches that are made of one micro-batch of each lane. Collective.

        Args:
            eval_set: the dataset.
            outputs: those of this process's lanes, by the number of the micro-batch in its lane.

        Returns:
            Sums and weights, as a lane's result has them; the same on every rank.
        """
        whole = self._whole
        assert whole is not None
        num_batches = eval_set.num_batches(range(1))
        if num_batches is None:
            num_batches = max(self.world.all_gather_tree(max(outputs, default=-1))) + 1
        local: dict[tuple[int, int], list[dict[str, torch.Tensor]]] = {}
        gathered = nullcontext() if self.reducer is None else self.reducer.gathered(self.model)
        with eval_mode(self.model), torch.no_grad(), gathered:
            for number in range(num_batches):
                own = sorted(outputs.get(number, ()), key=attrgetter("lane"))
                batch = gather_outputs(own, number, self.world, self.placement.most)
                for lane, rows in whole.parts(batch, self.placement.own):
                    set_random_state(batch_loss_seed(self.lanes.seed, number, lane, "evaluation"))
                    returned = whole.compute(self.model, batch.values, rows)
                    losses = Losses({}, {})
                    losses.note(check_each(returned, rows.stop - rows.start, self.lanes.what))
                    local[number, lane] = losses.sent()
        told = self.world.all_gather_tree([[*key, losses] for key, losses in local.items()])
        # All processes that have samples compute the same, where it is not by rows.
        return list({(number, lane): losses for of_rank in told for number, lane, losses in of_rank}.values())

    def _merge(
        self,
        eval_set: EvalSet,
        lanes: Mapping[int, _LaneResult],
        losses: Iterable[Sequence[Mapping[str, torch.Tensor]]],
    ) -> dict[str, float]:
        """Merge losses, and the metrics of all lanes in lane order."""
        of_losses = merge_losses(losses)
        # The lanes drew different random numbers on each process.
        set_random_state(metric_seed(self.lanes.seed, eval_set.name))
        with noting(lambda: f"when the metrics of eval dataset {eval_set.name} were computed"):
            in_order = [lanes[lane].states for lane in sorted(lanes)]
            metrics = merge_metrics(self._metrics_for(eval_set), in_order)
        if taken := sorted(of_losses.keys() & metrics.keys()):
            raise TaskError(
                f"the loss reports {taken[0]}, and {eval_set.name}/{taken[0]} is a value of the metrics of "
                "build_metrics too. Give one of them another name."
            )
        of_loss = {"loss": of_losses.pop("loss")} if "loss" in of_losses else {}
        return of_loss | metrics | of_losses


@contextmanager
def eval_mode(model: nn.Module, other: str = "") -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards back into its own mode, with its own buffers.

    A module may update statistics during an evaluation too. Without the restored buffers, these statistics,
    which depend on the layout, would affect the training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with evaluating([model], other):
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training
