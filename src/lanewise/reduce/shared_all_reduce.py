"""Sums over lanes through memory that the processes of one machine share; nothing is sent.

[Note: two barriers]
Every process writes its subtree sums into its block of the shared memory. After a first barrier, each process
adds its slice of all subtree sums in place, so that the result is where the last subtree sum was. After a
second barrier, all processes copy the result. A piece too small to be worth the second barrier is added as a
whole by every process. A bucket larger than a block is summed in pieces.
"""

from collections.abc import Sequence
from typing import final

import torch

from lanewise.lanes import Node, Placement, Present
from lanewise.processes.world.shared_memory import SharedMemory
from lanewise.reduce.pending import new_tree_sum

_SMALL_BYTES = 2**14
"""The largest piece that every process adds as a whole."""


@final
class SharedAllReduce:
    """Sums flat CPU tensors over all lanes. See [Note: two barriers].

    The calling thread computes the sums: no core is idle that could do it during the backward.

    Args:
        memory: the shared memory of all processes.
        placement: which process carries which lanes.
    """

    def __init__(self, memory: SharedMemory, placement: Placement) -> None:
        self._memory = memory
        self._placement = placement

    def start(
        self, subtree_sums: list[torch.Tensor], present: Present, bucket: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        nodes = self._placement.subtrees(present)
        size = self._memory.block_bytes // bucket.itemsize // max(map(len, nodes))
        try:
            for piece, *sums in zip(*(flat.split(size) for flat in (bucket, *subtree_sums)), strict=True):
                self._reduce(sums, nodes, present, piece)
            future.set_result(bucket)
        except Exception as error:  # noqa: BLE001 - raised where DDP waits for the future
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
        return future

    def close(self) -> None:
        """Nothing is open."""

    def _reduce(
        self,
        sums: Sequence[torch.Tensor],
        nodes: Sequence[Sequence[Node]],
        present: Present,
        piece: torch.Tensor,
    ) -> None:
        """Sum a piece over all lanes; `nodes` has the nodes of each rank."""
        memory, size = self._memory, piece.numel()
        blocks = memory.blocks(piece.dtype)
        for index, subtree_sum in enumerate(sums):
            blocks[memory.rank, index * size : (index + 1) * size] = subtree_sum
        memory.barrier()
        is_small = piece.nbytes <= _SMALL_BYTES
        start, stop = (size * rank // memory.world_size for rank in (memory.rank, memory.rank + 1))
        tree_sum = new_tree_sum(self._placement.num_lanes, present)
        last = piece
        for block, rank_nodes in zip(blocks, nodes, strict=True):
            for index, node in enumerate(rank_nodes):
                last = block[index * size : (index + 1) * size]
                tree_sum.push(node, [last.clone() if is_small else last[start:stop]])
        if is_small:
            (last,) = tree_sum.root()
        else:
            memory.barrier()
        piece.copy_(last)
