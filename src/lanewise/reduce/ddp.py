"""Sums the lanes' gradients over processes, through torch's DistributedDataParallel.

[Note: parameters that the last lane did not use]
DDP sends a bucket when each of its parameters was reported ready once. In the backward of the last lane,
autograd reports the parameters that this lane used. `DDPReducer` reports all others at the beginning of that
backward; hooks of the user on these parameters are not called, on any number of processes.

A backward within the backward (activation checkpointing with use_reentrant=True) reaches parameters that the
graph does not show, possibly several times. So in the first step, and in all further steps if there is such a
nested backward, all parameters are reported after the backward, and no communication overlaps it.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lanewise.config import CompressionName, Equality
from lanewise.lanes import LaneTurn, Node, Placement
from lanewise.processes.world.world import World
from lanewise.reduce.all_reduce import AllReduce, open_all_reduce
from lanewise.reduce.caller import Caller
from lanewise.reduce.compression import CompressedAllReduce
from lanewise.reduce.pending import is_dense, new_tree_sum
from lanewise.reduce.reducer import Reducer, divide_gradients, run_backward, without_loss


@final
class DDPReducer(Reducer):
    """A reducer through stock DDP, which makes the buckets and overlaps them with the backward.

    A communication hook of DDP adds the lanes. The task sees no wrapper: DDP wraps a `Caller`.

    Collective: every rank must construct it, and run every step.

    Args:
        model: the user's module; equal on all ranks.
        placement: which process carries which lanes.
        world: the processes; more than one.
        equality: `exact` adds in the tree over lanes; in `close` autograd adds the lanes of a process, and an
            all-reduce adds the processes.
        compression: how gradients are compressed in `close`; None: they are not.
        on_bucket: called inside the last lane's backward, when the gradients of a bucket are complete.
    """

    _all_reduce: AllReduce

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        world: World,
        equality: Equality,
        compression: CompressionName | None,
        *,
        on_bucket: Callable[[], None],
    ) -> None:
        super().__init__(model, placement.num_lanes, equality)
        self._num_processes = world.world_size
        self._on_bucket = on_bucket
        self._turn: LaneTurn | None = None
        self._earlier: list[tuple[Node, dict[torch.Tensor, torch.Tensor]]] = []
        self._ddp = DistributedDataParallel(
            Caller(model),
            gradient_as_bucket_view=True,
            init_sync=False,  # the replicas were compared; a difference is an error, not overwritten
            **_no_buffer_broadcast(),
        )
        # Kept, since autograd keeps a parameter's node only while something refers to it.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        self._use_order: list[int] = []
        self._graph_task = -1
        self._is_nested = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note_use, index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._all_reduce = open_all_reduce(world, placement, equality)
        self._compressed = None if compression is None else CompressedAllReduce(model, world, compression)
        self._ddp.register_comm_hook(None, self._sum_lanes if equality == "exact" else self._sum_processes)

    def backward(self, turn: LaneTurn, loss: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        """See [Note: parameters that the last lane did not use]."""
        if loss is None:
            loss = without_loss(self.parameters)
        if self._hooks:
            loss = _call_in_backward(loss, self._note_graph_task)
        if not turn.is_last:
            run_backward(loss, factor)
            if self._pending is not None:
                self._pending.push(turn)
            return
        self._turn = turn
        if self._pending is not None:
            self._earlier = self._pending.take()
        if self._hooks:
            run_backward(loss, factor)
            self._enter_ddp(without_loss(self.parameters)).backward()
            self._end_first_step()
        else:
            run_backward(self._enter_ddp(loss), factor)

    def finish(self, weight: float) -> None:
        divide_gradients(self.parameters, weight)

    def _enter_ddp(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Return a loss whose backward reduces the gradients. DDP need not see the lane's forward.

        Collective: DDP may rebuild its buckets.
        """
        connected: torch.Tensor = self._ddp(lambda: _call_in_backward(loss_sum, self._report_unused))
        return connected

    def _report_unused(self) -> None:
        """Report to DDP, at the beginning of a backward, each parameter that this backward will not reach."""
        for index in dict.fromkeys([*self._use_order, *range(len(self.parameters))]):
            if not torch._C._will_engine_execute_node(self._nodes[index]):  # noqa: SLF001
                self._ddp.reducer._autograd_hook(index)  # type: ignore[attr-defined]  # noqa: SLF001

    def _note_graph_task(self) -> None:
        self._graph_task = torch._C._current_graph_task_id()  # noqa: SLF001

    def _note_use(self, index: int, _parameter: torch.Tensor) -> None:
        self._use_order.append(index)
        self._is_nested |= torch._C._current_graph_task_id() != self._graph_task  # noqa: SLF001

    def _end_first_step(self) -> None:
        self._use_order = []
        if self._is_nested:  # the next step may have a nested backward, too
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
        # DDP holds its hook, which holds this object: a reference cycle through C++, which python does not
        # see. When it was freed with the interpreter, 1 of 15 processes aborted (SIGABRT after a good run).
        del self._ddp

    def _sum_lanes(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Add the pending sums to a bucket of the last lane's gradients, and start its all-reduce.

        DDP calls this inside the backward, for each bucket as soon as its gradients are complete.
        """
        self._on_bucket()
        assert self._turn is not None
        turn, flat, parameters = self._turn, bucket.buffer(), bucket.parameters()
        tree_sum = new_tree_sum(self._num_lanes, turn.present)
        for node, sums in self._earlier:
            tree_sum.push(node, [sums.pop(parameter) for parameter in parameters])
        if not turn.positions:
            return self._all_reduce.start([], turn.present, flat)
        # The bucket is the right operand of every addition, so the last sum is in the bucket itself.
        tree_sum.push((turn.lane, turn.lane + 1), _views(flat, bucket))
        *others, _ = tree_sum.pending
        subtree_sums = [_flatten(sums, bucket) for _, sums in others] + [flat]
        return self._all_reduce.start(subtree_sums, turn.present, flat)

    def _sum_processes(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the sum of a bucket over the processes; DDP's own hook would compute a mean."""
        self._on_bucket()
        if self._compressed is not None:
            return self._compressed.start(bucket)
        flat = bucket.buffer()
        return self._all_reduce.start([flat], range(self._num_processes), flat)


def _call_in_backward(loss_sum: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
    """Return the loss, with a backward that first calls a function."""
    loss_sum = loss_sum.clone()  # the user may use the given tensor again, which must get no hook
    loss_sum.register_hook(lambda _: function())
    return loss_sum


def _flatten(gradients: list[torch.Tensor], bucket: GradBucket) -> torch.Tensor:
    """Copy gradients into a new flat tensor with the layout of the bucket."""
    flat = torch.empty_like(bucket.buffer())
    for gradient, view in zip(gradients, _views(flat, bucket), strict=True):
        view.copy_(gradient)
    return flat


def _views(flat: torch.Tensor, bucket: GradBucket) -> list[torch.Tensor]:
    """Return views of the gradients in the bucket's own buffer, or in a flat tensor with the same layout.

    `bucket.gradients()` has the right offsets, but treats each gradient as contiguous and real. In the
    buffer, the gradient of a dense parameter (transposed, channels_last) has the parameter's strides, any
    other gradient is contiguous, and complex numbers are pairs of real ones.
    """
    parameters, start = bucket.parameters(), bucket.buffer().storage_offset()
    if parameters[0].is_complex() and not flat.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    return [
        flat.as_strided(
            parameter.size(),
            parameter.stride() if is_dense(parameter) else contiguous.stride(),
            flat.storage_offset() + contiguous.storage_offset() - start,
        )
        for contiguous, parameter in zip(bucket.gradients(), parameters, strict=True)
    ]


def _no_buffer_broadcast() -> dict[str, Any]:
    """Switch off DDP's copying of rank 0's buffers, an option that torch 2.13 renamed."""
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
