"""The optimizer steps of a loop of one's own, and the micro-batches in each."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lanewise.data import LaneBatch, LaneLoader
from lanewise.engine.lane import to_device
from lanewise.engine.passes import LanePasses
from lanewise.errors import TaskError


class Steps:
    """The optimizer steps of a run. Each iteration yields those of one epoch, or what is left of it."""

    def __init__(
        self,
        loader: LaneLoader,
        models: list[nn.Module],
        passes: list[LanePasses],
        device: torch.device,
        first_step: int,
    ) -> None:
        self._schedule = loader.schedule
        self._models = models
        self._passes = passes
        self._next = first_step
        self._last: Step | None = None
        # One iterator for the whole run: reading ahead never stops between epochs.
        self._batches = loader.batches(first_step, _FOR_EVER)
        self._device = device

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._next // self._schedule.steps_per_epoch

    def __len__(self) -> int:
        """Count the steps of an epoch."""
        return self._schedule.steps_per_epoch

    def __iter__(self) -> "Iterator[Step]":
        epoch = self.epoch
        while self.epoch == epoch:
            if self._last is not None and not self._last.is_done:
                raise TaskError(
                    f"step {self._last.number} was left before its micro-batches were done. "
                    "Iterate over each step to its end."
                )
            step = self._last = Step(
                self._next, epoch, self._batches, self._models, self._passes, self._device
            )
            self._next += 1
            yield step


class Step:
    """One optimizer step: an iterator over the micro-batches of the lanes that this process carries."""

    def __init__(
        self,
        number: int,
        epoch: int,
        batches: Iterator[LaneBatch],
        models: list[nn.Module],
        passes: list[LanePasses],
        device: torch.device,
    ) -> None:
        self.number = number
        """Counted over the whole run."""
        self.epoch = epoch
        self._batches = batches
        self._device = device
        self._models = models
        self._all_passes = passes
        self._passes: LanePasses | None = None
        self._running: LanePasses | None = None
        self._kept: list[LaneBatch] = []
        self._num_passes = 0

    @property
    def is_done(self) -> bool:
        """Whether a loop over its micro-batches came to the end, where gradients become whole."""
        return self._num_passes > 0

    def __iter__(self) -> Iterator[Any]:
        if not self._models:
            raise TaskError("no model was prepared. Call lanes.prepare(model) before the first step.")
        if len(self._models) > 1:
            raise TaskError(
                f"{len(self._models)} models were prepared, so a step must be told whose gradients to make. "
                "Iterate over step.batches(model)."
            )
        return self.batches(self._models[0])

    def batches(self, model: nn.Module) -> Iterator[Any]:
        """Yield the micro-batches; each needs one `backward`. Afterwards the model's gradients are whole.

        Every parameter's `grad` is then the weighted mean over the global batch, or None where there is
        nothing to update by: the global weight is 0, or an fp16 gradient overflowed.

        Collective: every rank must iterate to the end. Every call yields the same micro-batches, under other
        random numbers.

        Args:
            model: one that was prepared; of others, gradients are left as they are on this process.

        Raises:
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        numbers = [number for number, one in enumerate(self._models) if one is model]
        if not numbers:
            raise TaskError("this model was not prepared. Call lanes.prepare(model) before the first step.")
        if self._kept and not self._kept[-1].turn.is_last:
            raise TaskError(
                f"step {self.number} was left before its micro-batches were done. "
                "Iterate over each step to its end."
            )
        passes = self._all_passes[numbers[0]]
        self._running, self._passes = passes, None
        for (batch,) in passes.groups(to_device(self._read(), self._device), self._num_passes):
            passes.set_random_state(batch.turn)
            yield batch.data
        self._num_passes += 1
        self._passes = passes

    def backward(self, loss: object) -> None:
        """Compute the gradients of a micro-batch, in place of `loss.backward()`.

        The gradients of the step are whole when the loop over its micro-batches has ended.

        Args:
            loss: a mean over the micro-batch's samples, or a `Loss`.

        Raises:
            TaskError: if it cannot be trained on, or this is no place for it.
        """
        if self._running is None:
            raise TaskError("backward was called outside of the loop over a step's micro-batches.")
        self._running.backward([loss])

    @property
    def loss(self) -> float:
        """Weighted mean of the loss over the global batch, in the last pass."""
        return self._done().totals.loss

    @property
    def weight(self) -> float:
        """Weight of the global batch, in the last pass."""
        return self._done().totals.weight

    @property
    def grad_norm(self) -> torch.Tensor:
        """L2 norm of the gradient before any clipping, a scalar on the device."""
        return self._done().grad_norm

    def _done(self) -> LanePasses:
        if self._passes is None:
            raise TaskError(
                "this is known when the loop over the step's micro-batches has ended, not before."
            )
        return self._passes

    def _read(self) -> Iterator[LaneBatch]:
        """Yield this step's batches as they were read, and keep them for further passes."""
        if self._kept:
            yield from self._kept
            return
        for batch in self._batches:
            self._kept.append(batch)
            yield batch


_FOR_EVER = 10**15
