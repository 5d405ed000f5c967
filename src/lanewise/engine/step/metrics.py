"""The contents of a line of metrics, and the names of its columns."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lanewise.engine.precision import LossScale
from lanewise.engine.step.phases import Phases, StepTimes
from lanewise.engine.step.totals import StepTotals, means
from lanewise.lanes import LaneTurn
from lanewise.processes.device.accelerator import peak_bytes, start_copy_to_host
from lanewise.runs.callback import LargestLoss


@dataclass(frozen=True)
class IntervalTotals:
    """Totals over the steps of an interval."""

    num_steps: int
    loss: float
    """Sum of all losses divided by the sum of all weights; NaN where that sum is 0."""
    mean_weight: float
    """Mean weight of a step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The sum of all sums divided by the sum of all weights, for each metric of the losses; NaN likewise."""
    largest: LargestLoss | None = None
    """The first lane with the largest loss per unit of weight, its step as an index; None without weight."""


@final
class LogInterval:
    """The steps since the last line of metrics, the same on every rank.

    A line is written after the first step, after every `every_steps` of the run and after the last step.

    Args:
        every_steps: steps from one line to the next.
        last_step: the step before which training ends; None where only the data tells.
        is_over: tells whether the data has ended with the step.
        samples_of: returns the samples of a lane in a step; see `LaneLoader`. None where lanes have no loss
            of their own.
    """

    def __init__(
        self,
        every_steps: int,
        last_step: int | None,
        is_over: Callable[[], bool] = lambda: False,
        samples_of: Callable[[int, Any], Sequence[int]] | None = None,
    ) -> None:
        self._every_steps = every_steps
        self._last_step = last_step
        self.is_over = is_over
        self._samples_of = samples_of
        self._metrics: dict[str, tuple[float, float]] = {}
        self._largest: LargestLoss | None = None
        self._begin()

    def until(self, last_step: int) -> "LogInterval":
        """Return this interval of a run that ends before another step."""
        other = LogInterval(self._every_steps, last_step, self.is_over, self._samples_of)
        other.load_state_dict(self.state_dict())
        return other

    def is_due(self, step: int) -> bool:
        """Tell whether a line is written after a step; a stream has one more, where `is_over` says so."""
        return step + 1 in (1, self._last_step) or (step + 1) % self._every_steps == 0

    def add(self, step: int, totals: StepTotals) -> None:
        """Add a step."""
        self._num_steps += 1
        if totals.weight:  # otherwise the step is skipped, and lanes may have sums all the same
            self._loss_sum += totals.loss_sum
            self._weight += totals.weight
        for name, (value, weight) in totals.metrics.items():
            value_before, weight_before = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = value_before + value, weight_before + weight
        most = -math.inf if self._largest is None else self._largest.loss
        for lane, ((lane_sum, lane_weight, factor), *_) in totals.lanes:
            if lane_weight and most < (loss := float(lane_sum * factor / lane_weight)) < math.inf:
                most, self._largest = loss, LargestLoss(loss, step, lane, [])
        if totals.to_source:  # a stream tells the samples only in their own step
            self._find_samples(step)

    def _find_samples(self, step: int | None = None) -> None:
        """Find the samples of the largest loss, if nobody has and it is of this step; None: of any."""
        largest, find = self._largest, self._samples_of
        if find and largest and not largest.samples and step in (None, largest.step):
            self._largest = largest._replace(samples=list(find(largest.step, largest.lane)))

    def take(self) -> IntervalTotals:
        """Return the totals, and begin the next interval."""
        loss = self._loss_sum / self._weight if self._weight else math.nan
        self._find_samples()
        metrics, largest = means(self._metrics), self._largest
        if largest and not self._samples_of:
            largest = largest._replace(lane=None)
        mean_weight = self._weight / max(1, self._num_steps)
        totals = IntervalTotals(self._num_steps, loss, mean_weight, metrics, largest)
        self._begin()
        return totals

    @property
    def metric_names(self) -> Collection[str]:
        """The names of the metrics that losses reported in the run so far, also before it was resumed."""
        return tuple(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums for a checkpoint, so that a run that resumes from it writes the same line."""
        metrics = {name: list(sums) for name, sums in self._metrics.items()}
        sums = {"num_steps": self._num_steps, "loss_sum": self._loss_sum, "weight": self._weight}
        return {**sums, "metrics": metrics, "largest": self._largest and list(self._largest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums; a checkpoint of an earlier version lacks metrics or the largest loss.

        Raises:
            ValueError: if `state` is not what `state_dict` returns.
        """
        num_steps, loss_sum, weight = state["num_steps"], state["loss_sum"], state["weight"]
        types = [type(num_steps), type(loss_sum), type(weight)]
        metrics, largest = state.get("metrics", {}), state.get("largest")
        is_wrong = types != [int, float, float] or num_steps < 0 or not weight >= 0
        is_wrong |= not _are_sums(metrics)
        is_wrong |= largest is not None and list(map(type, largest)) != [float, int, int, list]
        if is_wrong or state.keys() - self.state_dict().keys():
            raise ValueError(f"not a state of the steps since the last line of metrics: {state!r:.100}")
        self._num_steps, self._loss_sum, self._weight = num_steps, loss_sum, weight
        self._metrics = {name: (value, weight) for name, (value, weight) in metrics.items()}
        self._largest = None if largest is None else LargestLoss(*largest)

    def _begin(self) -> None:
        self._num_steps = 0
        self._loss_sum = 0.0
        self._weight = 0.0
        self._largest = None
        self._metrics = dict.fromkeys(self._metrics, (0.0, 0.0))  # the names stay those of the run


def _are_sums(metrics: object) -> bool:
    """Tell whether a checkpoint's metrics are pairs of a sum and a weight by name."""
    return isinstance(metrics, Mapping) and all(
        isinstance(sums, list) and list(map(type, sums)) == [float, float] and not sums[1] < 0
        for sums in metrics.values()
    )


@dataclass(frozen=True)
class IntervalReport:
    """The numbers of a line of metrics: of an interval of steps, and of its last step.

    All but the times are the same on every rank. Reading a number may wait for the device.
    """

    epoch: int
    step: int
    totals: IntervalTotals
    learning_rate: float
    """The learning rate of the first parameter group in the last step."""
    grad_norm: Callable[[], torch.Tensor]
    """Norm of the last step's gradient before clipping."""
    gradient_norms: Callable[[], Mapping[str, float]]
    """Norm of each parameter's gradient in the last step, before clipping; empty unless they are logged."""
    skipped_steps: int | None
    """Number of steps of the run that updated nothing because an fp16 gradient overflowed; None in other
    formats."""
    times: Callable[[], StepTimes]
    """What this process spent its time on in these steps."""
    last_step: StepTotals
    """Of the last step alone."""
    num_samples: int = 0
    """Samples of all lanes in those steps of the interval that this start took; the engine counts them."""

    def columns(self, num_steps: int, device: torch.device) -> Mapping[str, float]:
        """Return the numbers by name, for metrics.jsonl, TensorBoard and callbacks. Waits for the device.

        Args:
            num_steps: the steps of the interval that this process took itself, not before it resumed.
            device: the device of this process.
        """
        seconds = sum(self.times().phases.values())
        columns = {
            "train/loss": self.totals.loss,
            "train/weight": self.totals.mean_weight,
            "train/grad_norm": float(self.grad_norm()),
            "train/learning_rate": self.learning_rate,
            **{f"train/{name}": mean for name, mean in self.totals.metrics.items()},
            "perf/samples_per_second": self.num_samples / seconds,
            "perf/units_per_second": self.totals.mean_weight * num_steps / seconds,
            **self._slowest_rank(),
            **self.own_columns(num_steps, device),
        }
        columns |= {f"gradients/{name}": norm for name, norm in self.gradient_norms().items()}
        if self.skipped_steps is not None:
            columns["train/skipped_steps"] = self.skipped_steps
        return columns

    def own_columns(self, num_steps: int, device: torch.device) -> Mapping[str, float]:
        """Return the numbers of this process by name: its times and its memory. Waits for the device.

        Args:
            num_steps: as in `columns`.
            device: the device of this process.
        """
        times = self.times()
        return {
            "perf/step_p50_seconds": times.percentile(50),
            "perf/step_p95_seconds": times.percentile(95),
            **{f"time/{phase}_seconds": spent / num_steps for phase, spent in times.phases.items()},
            "memory/peak_gib": peak_bytes(device) / 2**30,
        }

    def _slowest_rank(self) -> Mapping[str, float]:
        """Return who computed longest, how long, and how long the rank in the middle did."""
        seconds = self.last_step.computed_seconds
        if not seconds or any(map(math.isnan, seconds)):  # in the first steps nobody knows
            return {}
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        return {
            "perf/slowest_rank": slowest,
            "perf/slowest_rank_seconds": seconds[slowest],
            "perf/median_rank_seconds": median(seconds),
        }


class Gradient(NamedTuple):
    """What a pass over the lanes of a step found; the gradient itself is in every `param.grad`."""

    turn: LaneTurn
    """The last turn of this process in the step."""
    totals: StepTotals
    """Loss and weight."""
    norm: torch.Tensor | None
    """L2 norm of the gradient, a scalar on the device; None where nothing needs it."""
    norms: torch.Tensor | None
    """L2 norm of each parameter's gradient, [num_parameters], of which `norm` is made; None likewise."""
    allows_update: bool
    """Whether the weights may be updated: the step has weight, and fp16 did not overflow. If not, every
    `grad` is None."""
    is_logged: bool
    """Whether the step is logged, so that it has the norms."""


class StepReport(NamedTuple):
    """The outcome of a step."""

    step: int
    totals: StepTotals
    interval: IntervalReport | None
    """The numbers of a line of metrics; None where the step is not logged."""


@dataclass(frozen=True)
class StepMetrics:
    """Makes the report of an interval after the last of its steps."""

    interval: LogInterval
    """The steps since the last line of metrics."""
    phases: Phases
    """Measures those of each step."""
    model: nn.Module
    """The model whose gradients are reported."""
    loss_scale: LossScale | None
    """The loss scale of fp16; None in other formats."""
    with_norms: bool
    """Whether to report the norm of each parameter's gradient."""

    def report(self, gradient: Gradient, learning_rate: float) -> IntervalReport:
        """Return the report of the interval, after a step that is logged, and begin the next one."""
        turn = gradient.turn
        assert gradient.norm is not None
        return IntervalReport(
            epoch=turn.epoch,
            step=turn.step,
            totals=self.interval.take(),
            learning_rate=learning_rate,
            grad_norm=start_copy_to_host(gradient.norm),
            gradient_norms=self._named_norms(gradient.norms if self.with_norms else None),
            skipped_steps=None if self.loss_scale is None else self.loss_scale.skipped_steps,
            times=self.phases.take(),
            last_step=gradient.totals,
        )

    def _named_norms(self, norms: torch.Tensor | None) -> Callable[[], Mapping[str, float]]:
        """Return a function that waits for the norms of the gradients, and returns them by parameter name."""
        if norms is None:
            return dict
        wait = start_copy_to_host(norms)
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return lambda: dict(zip(names, wait().tolist(), strict=True))
