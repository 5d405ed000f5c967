"""Sums the gradients of one bucket over the processes, and chooses the algorithm."""

from typing import TypeAlias, final

import torch
import torch.distributed as dist

from lanewise.config import Equality
from lanewise.lanes import Placement, Present
from lanewise.processes.world.world import World
from lanewise.reduce.shared_all_reduce import SharedAllReduce
from lanewise.reduce.tree_all_reduce import TreeAllReduce


@final
class BackendAllReduce:
    """Sums flat tensors over processes with the backend's own all_reduce, in any order.

    Of this and of the others: collective, every rank must construct it, and call `start` equally often, with
    tensors of equal sizes.
    """

    def start(
        self, subtree_sums: list[torch.Tensor], present: Present, bucket: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum a bucket.

        Args:
            subtree_sums: this rank's flat sums, in the order of the nodes; empty if all its lanes are absent.
            present: the addends of this step, of all ranks: lanes, or in `close` processes.
            bucket: flat tensor that may be overwritten; gives size and dtype where there are no sums.

        Returns:
            A future of the flat sum over all addends.
        """
        work = dist.all_reduce(bucket, async_op=True)
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed

    def close(self) -> None:
        """Stop the background work."""


AllReduce: TypeAlias = BackendAllReduce | SharedAllReduce | TreeAllReduce
"""Sums flat tensors over addends, which are the lanes of the run or its processes."""


def open_all_reduce(world: World, placement: Placement, equality: Equality) -> AllReduce:
    """Choose how buckets are summed. Collective: every rank must call this.

    In `exact` the addends are lanes. In `close` they are processes, each of which has one sum.
    """
    addends = placement if equality == "exact" else Placement.of(world.world_size, world)
    if world.shared_memory is not None:
        return SharedAllReduce(world.shared_memory, addends)
    if equality == "exact":
        return TreeAllReduce(world, addends)
    return BackendAllReduce()
