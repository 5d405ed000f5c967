"""The reduce-scatter of `exact` under FSDP: every element is added in the fixed tree over the lanes.

FSDP reduces lane by lane, over all processes at once, which is not the order of the tree. Here the processes
exchange the rows of their shards without adding (all_to_all), and each process adds its own rows in the tree:
first the lanes of each rank, as far as the tree allows, and at the end of the step all of them. Four lanes on
two processes:

    lane    of rank 0     of rank 1
    first   0             2             two rows are kept
    second  1             3             [0,2) and [2,4) are kept
    end     [0,4)

So partial sums of every rank are kept until the end of the step. They need as much memory as the whole
gradient, and several times as much if a rank has several partial sums.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from lanewise.lanes import Placement, Present, TreeSum
from lanewise.reduce.pending import new_tree_sum


@final
class TreeReduceScatter:
    """Replaces FSDP's reduce-scatter for one block: exchanges the gradients, and adds them afterwards.

    FSDP calls it in a lane's backward, as a `ReduceScatter` of torch; `push` ends a lane, `finish` the step.

    Args:
        placement: which process carries which lanes.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._sums: list[TreeSum[list[torch.Tensor]]] = []
        """For each rank, the sum over its lanes."""
        self._rows: torch.Tensor | None = None
        """The rows received in the present backward: [world_size, elements of the shard]."""
        self._output: torch.Tensor | None = None
        """The first output tensor of the step, of which every `param.grad` is a view."""
        self._num_backwards = 0
        self._num_added = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory for the sent gradients or for the sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Exchange the gradients of a lane; the sum is written by `finish`.

        Args:
            output_tensor: flat; every `param.grad` of this process will be a view of it.
            input_tensor: flat; this process's gradients, cut into one row for each rank.
            group: the processes.
            op: ignored, since it is always a sum.
            async_op: ignored, since it is never set.
        """
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        rows = received.view(len(self._placement.ranges), -1)
        if self._rows is None:
            self._rows = rows
        else:
            # The block ran several times in one forward, and all but one of its gradients are 0.0. The sum is
            # computed as -(-a - b): with b = 0.0, this keeps a = -0.0, which a + b would turn into 0.0.
            self._rows.neg_().sub_(rows).neg_()
        if self._output is None:
            self._output = output_tensor
        output_tensor.zero_()  # FSDP adds the outputs of later backwards to the first one

    def push(self, present: Present) -> None:
        """Add the rows that the last backward received to the partial sum of each rank."""
        self._num_backwards += 1
        if self._output is None:  # no lane has run the block so far
            return
        if not self._sums:
            self._present, self._lanes = present, self._placement.present(present)
            self._sums = [self._new_sum() for _ in self._placement.ranges]
        for number in range(self._num_added, self._num_backwards):
            rows = self._rows if number == self._num_backwards - 1 else None
            if rows is None:  # the lane did not run the block: zeros, as for an unused parameter
                rows = self._output.new_zeros(len(self._placement.ranges), self._output.numel())
            for lanes, tree_sum, row in zip(self._lanes, self._sums, rows, strict=True):
                for lane in lanes[number : number + 1]:  # none where the rank has fewer
                    tree_sum.push((lane, lane + 1), [row])
        self._num_added, self._rows = self._num_backwards, None

    def finish(self) -> None:
        """Write the sum over all lanes into the gradients."""
        if self._output is not None:
            total = self._new_sum()
            for tree_sum in self._sums:
                for node, rows in tree_sum.pending:
                    total.push(node, rows)
            self._output.copy_(total.root()[0])
        self._sums, self._output = [], None
        self._num_backwards = self._num_added = 0

    def _new_sum(self) -> TreeSum[list[torch.Tensor]]:
        return new_tree_sum(self._placement.num_lanes, self._present)
