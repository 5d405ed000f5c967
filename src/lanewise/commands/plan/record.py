"""Runs a lane, on fake tensors or on real ones, and records its memory."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from lanewise.commands.plan.memory import LaneMark, LaneMemory, Stretch
from lanewise.engine.step.lanes import TaskLane
from lanewise.engine.step.terms import terms_of
from lanewise.errors import TaskError
from lanewise.processes.device.live_storage import LiveStorage, key_of
from lanewise.processes.device.nested import tensors_in
from lanewise.task import Loss


def record_memory(model: nn.Module, lane: TaskLane, blocks: Sequence[nn.Module]) -> LaneMemory:
    """Run forward, loss and backward of a lane, and take each gradient away when it is complete.

    Args:
        model: fake or real, as the batch of the lane; its buffers are changed as in training.
        lane: what to run.
        blocks: those whose forward and backward are marked, in the order of their numbers.

    Raises:
        TaskError: if the loss cannot be trained on.
    """
    batch_bytes = _bytes_of(lane.batch.data)
    with LiveStorage() as live, ExitStack() as hooks:
        live.count(tensors_in(lane.batch.data))
        recorder = _Recorder(live)
        for handle in recorder.watch(model, blocks):
            hooks.enter_context(handle)
        outputs = lane.forward(model, lane.batch.data)
        output_bytes, forward_bytes = _bytes_of(outputs), live.live_bytes
        loss = _loss_of(lane, outputs)
        loss_bytes = max(0, live.live_bytes - forward_bytes)
        del outputs
        recorder.mark(LaneMark.BACKWARD)
        saved_bytes = live.live_bytes
        loss.backward()
        recorder.end()
    return LaneMemory(recorder.stretches, batch_bytes, output_bytes, loss_bytes, saved_bytes)


def count_flops(model: nn.Module, lane: TaskLane) -> int:
    """Count the floating-point operations of a lane's forward and backward, as torch counts them.

    `record_memory` cannot do it on the way, since the counter keeps tensors that would be freed.
    """
    with FlopCounterMode(display=False) as counter:
        _loss_of(lane, lane.forward(model, lane.batch.data)).backward()
    model.zero_grad()
    return int(counter.get_total_flops())


def _loss_of(lane: TaskLane, outputs: Any) -> torch.Tensor:
    returned = lane.loss(outputs, lane.batch.data)
    if terms := terms_of(returned):
        return torch.stack([term.sum for term in terms]).sum()
    loss = returned.sum if isinstance(returned, Loss) else returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise TaskError(
            f"the loss of {type(lane.runner.task).__name__} must be a scalar tensor with a gradient, or a "
            f"Loss of one: got {returned!r:.60}. `lanewise train` says more."
        )
    return loss.reshape(())


def _bytes_of(data: Any) -> int:
    """Return the bytes of the storages of all tensors."""
    storages = {key_of(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors_in(data)}
    return sum(storage.nbytes() for storage in storages.values())


@final
class _Recorder:
    """Cuts what `LiveStorage` sees into stretches."""

    def __init__(self, live: LiveStorage) -> None:
        self.stretches: list[Stretch] = []
        self._live = live
        self._begin = (LaneMark.FORWARD, 0, live.live_bytes)

    def mark(self, mark: LaneMark, number: int = 0) -> None:
        """End a stretch and begin another one."""
        self.stretches.append(Stretch(*self._begin, self._live.take_peak()))
        self._begin = (mark, number, self._live.live_bytes)

    def end(self) -> None:
        """End the last stretch, and the record."""
        self.mark(LaneMark.END)
        self.stretches.append(Stretch(*self._begin, self._live.live_bytes))

    def watch(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[RemovableHandle]:
        """LaneMark what the parameters and the blocks do, until the handles are removed."""
        for number, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, number))
        for number, block in enumerate(blocks, 1):
            yield block.register_forward_pre_hook(partial(self._begin_block, number))
            yield block.register_forward_hook(partial(self._end_block, number))

    def _take_gradient(self, number: int, parameter: torch.Tensor) -> None:
        self.mark(LaneMark.GRADIENT, number)
        parameter.grad = None

    def _begin_block(self, number: int, _module: nn.Module, _inputs: Any) -> None:
        self.mark(LaneMark.BLOCK_FORWARD, number)

    def _end_block(self, number: int, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self.mark(LaneMark.BLOCK_END, number)
        if with_gradient := [output for output in tensors_in(outputs) if output.requires_grad]:
            register_multi_grad_hook(
                with_gradient, lambda _: self.mark(LaneMark.BLOCK_BACKWARD, number), mode="any"
            )
