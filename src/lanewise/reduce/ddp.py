"""Sums the lanes' gradients over processes, through torch's DistributedDataParallel.

[Note: who tells DDP]
DDP sends a bucket when each of its parameters has told it once that its gradient is there. Autograd tells it
of those that the last lane used, in the middle of the backward. Of the others we tell it ourselves, when that
backward begins: whoever has hooks on them is not called, on any number of processes.

A backward within the backward (activation checkpointing with use_reentrant=True) comes to parameters that the
graph did not show, maybe several times. So in the first step, and in all steps where there is such a thing,
DDP is told of all parameters when the backward is over, and nothing overlaps.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from lanewise.config import CompressionName, Equality
from lanewise.lanes import LaneTurn, Node, Placement, TreeSum
from lanewise.reduce.all_reduce import open_all_reduce
from lanewise.reduce.caller import Caller
from lanewise.reduce.compression import CompressedAllReduce
from lanewise.reduce.pending import PendingGradients, add_into_right, is_dense
from lanewise.reduce.reducer import WholeModel, divide_gradients, run_backward, without_loss
from lanewise.world.world import World


@final
class DDPReducer(WholeModel):
    """Stock DDP does the bucketing and the overlap with backward; its communication hook adds.

    The task never meets a wrapper: DDP wraps a module that holds the user's parameters and whose forward
    calls a function, so that any method of the user's module may be called in it.

    Collective: every rank must construct it, and run every step.

    Args:
        model: the user's module; equal on all ranks.
        placement: who carries which lanes.
        world: the processes; more than one.
        equality: `exact` adds in the tree over lanes; in `close` autograd adds the lanes of a process, and an
            all-reduce adds the processes.
        compression: how gradients travel in `close`; None: as they are.
        on_bucket: called inside the last lane's backward, when the gradients of a bucket are complete.
    """

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
        super().__init__(model)
        self._num_lanes = num_lanes = placement.num_lanes
        self._world_size = world.world_size
        self._on_bucket = on_bucket
        self._turn: LaneTurn | None = None
        self._earlier: list[tuple[Node, dict[torch.Tensor, torch.Tensor]]] = []
        self._ddp = DistributedDataParallel(
            Caller(model),
            gradient_as_bucket_view=True,
            init_sync=False,  # the replicas were compared; a difference is an error, not overwritten
            **_no_buffer_broadcast(),
        )
        # Held as autograd knows a parameter's node only while a graph or somebody else has it.
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
        self._pending = PendingGradients(self.parameters, num_lanes) if equality == "exact" else None
        self._ddp.register_comm_hook(None, self._sum_lanes if equality == "exact" else self._sum_processes)

    def backward(self, turn: LaneTurn, loss: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        """See `Reducer`. See [Note: who tells DDP]."""
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
        """See `Reducer`."""
        divide_gradients(self.parameters, weight)

    def _enter_ddp(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Make a loss whose backward reduces. DDP need not see the forward.

        Collective: DDP may rebuild its buckets.
        """
        connected: torch.Tensor = self._ddp(lambda: _call_in_backward(loss_sum, self._tell_of_unused))
        return connected

    def _tell_of_unused(self) -> None:
        """Tell DDP, at the beginning of a backward, of each parameter that this backward will not come to."""
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
        if self._is_nested:  # and so may be the next step's
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """See `Reducer`."""
        self._all_reduce.close()
        for hook in self._hooks:
            hook.remove()
        # DDP holds its hook, which holds this object: a cycle through C++, which python does not see. Freed
        # with the interpreter, it aborted the process (seen: SIGABRT after a good run, 1 in 15).
        del self._ddp

    def _sum_lanes(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Add the pending sums to a bucket of the last lane's gradients and send it on its way.

        Runs inside backward, for each bucket as soon as its gradients exist.
        """
        self._on_bucket()
        assert self._turn is not None
        turn, flat, parameters = self._turn, bucket.buffer(), bucket.parameters()
        tree_sum: TreeSum[list[torch.Tensor]] = TreeSum(
            self._num_lanes, turn.num_present_lanes, add_into_right
        )
        for node, sums in self._earlier:
            tree_sum.push(node, [sums.pop(parameter) for parameter in parameters])
        if not turn.positions:
            return self._all_reduce.start([], turn.num_present_lanes, flat)
        # As the right operand of every addition, the bucket itself holds the last sum.
        tree_sum.push((turn.lane, turn.lane + 1), _views(flat, bucket))
        *others, _ = tree_sum.pending
        subtree_sums = [_flatten(sums, bucket) for _, sums in others] + [flat]
        return self._all_reduce.start(subtree_sums, turn.num_present_lanes, flat)

    def _sum_processes(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Add up a bucket over the processes, where DDP's own hook would make a mean."""
        self._on_bucket()
        if self._compressed is not None:
            return self._compressed.start(bucket)
        flat = bucket.buffer()
        return self._all_reduce.start([flat], self._world_size, flat)


def _call_in_backward(loss_sum: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
    """Return the loss, as one whose backward begins by calling a function."""
    connected: torch.Tensor = _CallInBackward.apply(loss_sum, function)  # type: ignore[no-untyped-call]
    return connected


class _CallInBackward(torch.autograd.Function):
    """The identity on its first argument."""

    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return loss_sum.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.function()
        return gradients[0], None


def _flatten(gradients: list[torch.Tensor], bucket: GradBucket) -> torch.Tensor:
    """Lay gradients out in a new flat tensor as the bucket lays out its own."""
    flat = torch.empty_like(bucket.buffer())
    for gradient, view in zip(gradients, _views(flat, bucket), strict=True):
        view.copy_(gradient)
    return flat


def _views(flat: torch.Tensor, bucket: GradBucket) -> list[torch.Tensor]:
    """View the gradients in the bucket's own buffer, or in a flat tensor with the same order.

    `bucket.gradients()` says where they begin, but takes each for contiguous and real. In fact elements of
    a dense parameter (transposed, channels_last) lie in its own order, those of other parameters
    contiguously, and complex ones as pairs of real ones.
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
