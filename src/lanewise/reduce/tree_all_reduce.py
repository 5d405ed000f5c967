"""The all-reduce of `exact`: every element is added in the fixed tree over the lanes, in every layout alike.

[Note: three stages]
A bucket of n elements is cut into one slice for each rank. Two ranks, the first with the subtrees [0,2) and
[2,3), the second with [3,6), slices a and b:

    all_to_all     rank 0 gets  [0,2)a [2,3)a [3,6)a      rank 1 gets  [0,2)b [2,3)b [3,6)b
    add            rank 0 has   [0,6)a                    rank 1 has   [0,6)b
    all_gather     both have    [0,6)a [0,6)b

Where every rank has one subtree, the same amount is sent as in a ring all-reduce: n (world_size - 1) /
world_size elements by each rank in each of the two collectives. A rank with k subtrees sends k times as much
in the first one.

[Note: one thread, in order]
On gloo, a collective that is started in the callback of another can deadlock. So each process has one thread
and a process group of its own. The thread runs the stages of one bucket after the other, in the order in
which DDP starts the buckets, which is the same on all ranks. On NCCL and similar backends the same calls only
enqueue work on a stream, and no thread is needed.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import final

import torch
import torch.distributed as dist

from lanewise.lanes import Placement, Present
from lanewise.processes.device.accelerator import new_stream, on_stream
from lanewise.processes.world.tree_message import all_gather_single
from lanewise.processes.world.world import World
from lanewise.reduce.pending import new_tree_sum


@final
class TreeAllReduce:
    """Sums flat tensors over all lanes, on any number of machines."""

    def __init__(self, world: World, placement: Placement) -> None:
        self._device = world.device
        self._placement = placement
        self._group = world.new_group(range(world.world_size))
        self._stream = new_stream(world.device)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: torch.futures.Future[torch.Tensor] | None = None
        if dist.get_backend(self._group) == "gloo":
            # A daemon: a process that fails must not wait for a collective that the others never join.
            self._thread = threading.Thread(target=self._work, name="tree-all-reduce", daemon=True)
            self._thread.start()

    def start(
        self, subtree_sums: list[torch.Tensor], present: Present, bucket: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self._device] if self._stream is not None else None
        )
        self._last = future
        ready = None
        if self._stream is not None:
            ready = torch.accelerator.current_stream(self._device).record_event()
            for tensor in (*subtree_sums, bucket):
                tensor.record_stream(self._stream)
        job = partial(self._reduce_into, future, ready, subtree_sums, present, bucket)
        if self._thread is None:
            job()
        else:
            self._jobs.put(job)
        return future

    def close(self) -> None:
        """End the thread after the buckets that it was given.

        A process that exits while the thread is alive may be aborted. If a bucket is still in progress, there
        was an error, and the thread may be stuck in a collective that other ranks never join.
        """
        self._jobs.put(None)
        if self._thread is not None:
            is_done = self._last is None or self._last.done()
            self._thread.join(timeout=None if is_done else 1.0)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _reduce_into(
        self,
        future: torch.futures.Future[torch.Tensor],
        ready: torch.Event | None,
        subtree_sums: list[torch.Tensor],
        present: Present,
        bucket: torch.Tensor,
    ) -> None:
        """Run the stages for a bucket and complete its future, on the side stream where there is one."""
        try:
            with on_stream(self._stream):
                if self._stream is not None and ready is not None:
                    self._stream.wait_event(ready)
                if self._thread is not None:  # gloo's all_to_all and all_gather need CPU tensors
                    subtree_sums, bucket = [subtree_sum.cpu() for subtree_sum in subtree_sums], bucket.cpu()
                summed = self._reduce(subtree_sums, present, bucket)
                future.set_result(summed.to(self._device))
        except Exception as error:  # noqa: BLE001 - raised where DDP waits for the future
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

    def _reduce(
        self, subtree_sums: list[torch.Tensor], present: Present, bucket: torch.Tensor
    ) -> torch.Tensor:
        """Sum a bucket over all lanes. See [Note: three stages]."""
        placement, size = self._placement, bucket.numel()
        world_size = len(placement.ranges)
        slice_size = -(-size // world_size)
        bounds = [min(rank * slice_size, size) for rank in range(world_size + 1)]
        nodes = placement.subtrees(present)
        local_size = bounds[placement.rank + 1] - bounds[placement.rank]

        if len(subtree_sums) == 1:
            send = subtree_sums[0]
        else:
            pieces = [
                subtree_sum[start:stop] for start, stop in pairwise(bounds) for subtree_sum in subtree_sums
            ]
            send = torch.cat(pieces) if pieces else bucket.new_empty(0)
        received = bucket.new_empty(local_size * sum(map(len, nodes)))
        dist.all_to_all_single(
            received,
            send,
            output_split_sizes=[local_size * len(rank_nodes) for rank_nodes in nodes],
            input_split_sizes=[(stop - start) * len(subtree_sums) for start, stop in pairwise(bounds)],
            group=self._group,
        )

        tree_sum = new_tree_sum(placement.num_lanes, present)
        all_nodes = [node for rank_nodes in nodes for node in rank_nodes]
        for index, node in enumerate(all_nodes):
            tree_sum.push(node, [received[index * local_size : (index + 1) * local_size]])
        local_slice = bucket.new_zeros(slice_size)  # the last ranks' slices may be shorter
        local_slice[:local_size] = tree_sum.root()[0]

        is_even = size == slice_size * world_size
        gathered = bucket if is_even else bucket.new_empty(slice_size * world_size)
        all_gather_single(gathered, local_slice, group=self._group)
        return gathered[:size]
