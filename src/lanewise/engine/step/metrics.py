"""The contents of a line of metrics, and the names of its columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lanewise.device.accelerator import peak_bytes, start_copy_to_host
from lanewise.engine.step.clock import StepClock
from lanewise.engine.step.gradient import StepGradient
from lanewise.engine.step.log_interval import IntervalTotals, LogInterval
from lanewise.precision import LossScale


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
    phase_seconds: Callable[[], dict[str, float]]
    """The seconds that this process spent in each phase of these steps."""

    def columns(self, num_steps: int, num_samples: int, device: torch.device) -> Mapping[str, float]:
        """Return the numbers by name, for metrics.jsonl, TensorBoard and callbacks. Waits for the device.

        Times and memory are those of this process.

        Args:
            num_steps: the steps of the interval that this process took itself, not before it resumed.
            num_samples: the samples of all lanes in these steps.
            device: the device of this process.
        """
        seconds = self.phase_seconds()
        columns = {
            "train/loss": self.totals.loss,
            "train/weight": self.totals.mean_weight,
            "train/grad_norm": float(self.grad_norm()),
            "train/learning_rate": self.learning_rate,
            "perf/samples_per_second": num_samples / sum(seconds.values()),
            **{f"time/{phase}_seconds": spent / num_steps for phase, spent in seconds.items()},
            "memory/peak_gib": peak_bytes(device) / 2**30,
        }
        columns |= {f"gradients/{name}": norm for name, norm in self.gradient_norms().items()}
        if self.skipped_steps is not None:
            columns["train/skipped_steps"] = self.skipped_steps
        return columns


class StepMetrics:
    """Adds up the steps of an interval, and makes its report after the last of them.

    Args:
        interval: the steps since the last line of metrics.
        clock: measures the phases of each step.
        model: the model whose gradients are reported.
        loss_scale: the loss scale of fp16; None in other formats.
        with_norms: whether to report the norm of each parameter's gradient.
    """

    def __init__(
        self,
        interval: LogInterval,
        clock: StepClock,
        model: nn.Module,
        loss_scale: LossScale | None,
        *,
        with_norms: bool,
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._model = model
        self._loss_scale = loss_scale
        self._with_norms = with_norms

    def needs(self, step: int) -> tuple[bool, bool]:
        """Tell whether a step needs the norm of its whole gradient, and whether of each parameter's."""
        is_logged = self._interval.ends_with(step)
        return is_logged, is_logged and self._with_norms

    def report(self, gradient: StepGradient, learning_rate: float) -> IntervalReport | None:
        """Add a step. If it is logged, return the report of the interval and begin the next one."""
        self._interval.add(gradient.totals)
        turn = gradient.turn
        if not self._interval.ends_with(turn.step):
            return None
        assert gradient.norm is not None
        return IntervalReport(
            epoch=turn.epoch,
            step=turn.step,
            totals=self._interval.take(),
            learning_rate=learning_rate,
            grad_norm=start_copy_to_host(gradient.norm),
            gradient_norms=self._named_norms(gradient.norms),
            skipped_steps=None if self._loss_scale is None else self._loss_scale.skipped_steps,
            phase_seconds=self._clock.take(),
        )

    def _named_norms(self, norms: torch.Tensor | None) -> Callable[[], Mapping[str, float]]:
        """Return a function that waits for the norms of the gradients, and returns them by parameter name."""
        if norms is None:
            return dict
        wait = start_copy_to_host(norms)
        names = [name for name, one in self._model.named_parameters() if one.requires_grad]
        return lambda: dict(zip(names, wait().tolist(), strict=True))
