"""The reduce-scatter of `exact` under FSDP: every element is added in the fixed tree over the lanes.

FSDP reduces lane by lane, over all processes at once, which is not the order of the tree. Here the processes
exchange the rows of their shards without adding (all_to_all), and each adds its own rows in the tree: first
the lanes of each rank as far as the tree allows, at the end of the step all of them. Four lanes on two
processes:

    lane    of rank 0     of rank 1
    first   0             2             two rows are kept
    second  1             3             [0,2) and [2,4) are kept
    end     [0,4)

So partial sums of every rank are kept until the end of the step: as much as the whole gradient, several times
where a rank has more lanes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lanewise.lanes import Placement, TreeSum
from lanewise.reduce.pending import add_into_right


class TreeReduceScatter:
    """Takes the place of FSDP's reduce-scatter for one block: it exchanges, and adds afterwards.

    FSDP calls it in a lane's backward, as a `ReduceScatter` of torch; `push` ends a lane, `finish` the step.

    Args:
        placement: who carries which lanes.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._sums: list[TreeSum[list[torch.Tensor]]] = []
        """Of the lanes of each rank."""
        self._rows: torch.Tensor | None = None
        """What the present pass brought: [world_size, elements of the shard]."""
        self._output: torch.Tensor | None = None
        """The first one of the step, of which every `param.grad` is a view."""
        self._num_passes = 0
        self._num_added = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is sent, or for the sum."""
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
            output_tensor: flat; `param.grad` of this process will be views of it.
            input_tensor: flat; this process's gradients, cut into a row for each rank.
            group: the processes.
            op: always a sum.
            async_op: never set.
        """
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        rows = received.view(len(self._placement.ranges), -1)
        if self._rows is None:
            self._rows = rows
        else:
            # The block ran several times in one forward; all but one of what it sent is 0.0. Negated, since
            # 0.0 + -0.0 is not -0.0, but -0.0 + 0.0 is what it should be.
            self._rows.neg_().sub_(rows).neg_()
        if self._output is None:
            self._output = output_tensor
        output_tensor.zero_()  # FSDP adds those of later passes to the first one

    def push(self, num_present_lanes: int) -> None:
        """Take what the last pass brought of each rank into its partial sum."""
        self._num_passes += 1
        if self._output is None:  # no lane ran it so far
            return
        if not self._sums:
            self._num_present_lanes = num_present_lanes
            self._sums = [self._new_sum() for _ in self._placement.ranges]
        for number in range(self._num_added, self._num_passes):
            rows = self._rows if number == self._num_passes - 1 else None
            if rows is None:  # as a lane gives that did not use a parameter
                rows = self._output.new_zeros(len(self._placement.ranges), self._output.numel())
            for lanes, tree_sum, row in zip(self._placement.ranges, self._sums, rows, strict=True):
                lane = lanes.start + number
                if lane in lanes and lane < num_present_lanes:
                    tree_sum.push((lane, lane + 1), [row])
        self._num_added, self._rows = self._num_passes, None

    def finish(self) -> None:
        """Write the sum over all lanes to where the gradients are."""
        if self._output is not None:
            total = self._new_sum()
            for tree_sum in self._sums:
                for node, rows in tree_sum.pending:
                    total.push(node, rows)
            self._output.copy_(total.root()[0])
        self._sums, self._output = [], None
        self._num_passes = self._num_added = 0

    def _new_sum(self) -> TreeSum[list[torch.Tensor]]:
        return TreeSum(self._placement.num_lanes, self._num_present_lanes, add_into_right)
