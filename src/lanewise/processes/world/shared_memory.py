"""Memory that the processes of one machine share, and barriers at which they wait for each other.

[Note: blocks and barriers]
Each process writes into a block of its own and reads those of all others. A barrier lies between: every
process sends a byte to every other one and waits for theirs, through a socket for each pair. So a process
that waits sleeps; the system calls order the writes before a barrier and the reads after it, on any CPU; and
a process that ends closes its sockets, which the others see at once.

There are two sets of blocks, used in turn. A process that writes into a set again has come through the
barrier of the other set, and no process comes to that barrier before it has read the first set:

    process 0    write a   barrier   read a   write b   barrier   read b   write a ...
    process 1    write a   barrier     read a ........ write b   barrier   read b ...

The memory has no name (`memfd_create`): it takes no room in a file system, such as a container's /dev/shm of
64 MiB, and is freed with the last process.
"""

import logging
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar, cast, final

import torch
import torch.distributed as dist

from lanewise.errors import LostRankError, WorldError, text_of
from lanewise.processes.world.tree_message import all_gather_tree

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCK_BYTES = 2**22
_SLOT_BYTES = 2**16
_MAX_OPEN = 2
_NUM_SLOTS = 2 * _MAX_OPEN
_HOST = torch.device("cpu")
_RANK, _TIME = struct.Struct("i"), struct.Struct("ll")


@final
class SharedMemory:
    """One block of memory for each process, and barriers. See [Note: blocks and barriers].

    Collective: every rank must call every method, in the same order.

    Args:
        rank: of this process.
        sockets: one for each other rank, connected to it.
        memory: the same on all ranks, of `size(world_size)` bytes.
        timeout_seconds: how long a barrier waits for a rank; None: for ever.
    """

    def __init__(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        memory: mmap.mmap,
        timeout_seconds: float | None = None,
    ) -> None:
        # The kernel's time limit: python's own would take another system call for each byte.
        for peer in sockets.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(int(timeout_seconds or 0), 0))
        self._timeout_seconds = timeout_seconds
        self.rank = rank
        self.world_size = len(sockets) + 1
        self.block_bytes = _BLOCK_BYTES
        self._sockets = sockets
        self._num_barriers = self._num_exchanges = self._num_gathers = self._num_open = 0
        num_slot_bytes = _NUM_SLOTS * self.world_size * _SLOT_BYTES
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = whole[:num_slot_bytes].view(_NUM_SLOTS, self.world_size, _SLOT_BYTES)
        self._blocks = whole[num_slot_bytes:].view(2, self.world_size, _BLOCK_BYTES)

    @staticmethod
    def size(world_size: int) -> int:
        """Return how many bytes of memory so many processes need."""
        return world_size * (_NUM_SLOTS * _SLOT_BYTES + 2 * _BLOCK_BYTES)

    def blocks(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the blocks of the next exchange: [world_size, num_elements], each row for its rank to write.

        At least one barrier must follow before another rank's row is read, and before the next exchange.
        """
        self._num_exchanges += 1
        return self._blocks[self._num_exchanges % 2].view(dtype)

    def barrier(self) -> None:
        """Wait until every rank is here.

        Raises:
            LostRankError: if a rank has ended.
            WorldError: if one does not come in time.
        """
        self._num_barriers += 1
        for peer in self._sockets.values():
            with suppress(ConnectionError):  # it may have sent its byte before it ended
                peer.send(b"x")
        for rank, peer in self._sockets.items():
            try:
                is_here = peer.recv(1)
            except BlockingIOError:
                raise WorldError(
                    f"rank {rank} did not come to an exchange within {self._timeout_seconds:.0f} s."
                ) from None
            except ConnectionError:
                is_here = b""
            if not is_here:
                raise LostRankError(
                    f"rank {rank} ended while this one waited for it. Its own error says why."
                )

    def can_gather(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is small enough for `start_all_gather`. No collective."""
        return tensor.nbytes <= _SLOT_BYTES

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a small tensor to every rank with the next barrier, whatever that is for.

        Returns:
            A function that waits and returns the ranks' tensors, stacked: [world_size, *tensor.shape].
        """
        slot = self._slots[self._num_gathers % _NUM_SLOTS, :, : tensor.nbytes].view(tensor.dtype)
        rows = slot.view(-1, *tensor.shape)
        rows[self.rank] = tensor
        num_barriers = self._num_barriers
        self._num_gathers += 1
        self._num_open += 1
        assert self._num_open <= _MAX_OPEN, "a slot could be written while a rank still reads it"

        def wait() -> torch.Tensor:
            if self._num_barriers == num_barriers:
                self.barrier()
            self._num_open -= 1
            return rows.clone()

        return wait

    def close(self) -> None:
        """Close the sockets. The others need not do so at the same time."""
        for peer in self._sockets.values():
            peer.close()


def share_memory(folder: Path | None = None, timeout_seconds: float | None = None) -> SharedMemory | None:
    """Share memory among the processes of torch's default process group, which are all on this machine.

    Collective: every rank must call this.

    Args:
        folder: where rank 0 makes a folder for the sockets, for the time of this call; None: where temporary
            files are.
        timeout_seconds: how long a barrier waits for a rank; None: for ever.

    Returns:
        None where the system refuses it on some rank; a line of the log says why.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sockets: dict[int, socket.socket] = {}
    with ExitStack() as stack:

        def make_folder() -> str:
            if rank > 0:
                return ""
            # No other user may enter it: one who could connect could keep the ranks waiting.
            return stack.enter_context(tempfile.TemporaryDirectory(prefix="lanewise-", dir=folder))

        def listen() -> tuple[socket.socket, str, int]:
            entered = os.open(place, os.O_PATH)
            stack.callback(os.close, entered)
            short = f"/proc/self/fd/{entered}"  # the path of a socket has at most 107 characters
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{short}/{rank}")
            listener.listen(world_size)
            file = os.memfd_create("lanewise")
            stack.callback(os.close, file)
            if rank == 0:
                os.posix_fallocate(file, 0, SharedMemory.size(world_size))  # else a write to it may be fatal
            return listener, short, file

        def share() -> mmap.mmap:
            _accept(sockets, listener, world_size)
            shared = file
            if rank == 0:
                for peer in sockets.values():
                    socket.send_fds(peer, [b"x"], [file])
            else:
                _, (shared,), *_ = socket.recv_fds(sockets[0], 1, 1)
                stack.callback(os.close, shared)
            return mmap.mmap(shared, SharedMemory.size(world_size))

        try:
            place = all_gather_tree(_agree(make_folder), _HOST)[0]
            listener, short, file = _agree(listen)
            # All have connected before any accepts, so none waits for a rank that could not connect.
            _agree(lambda: _connect(sockets, short, rank))
            return SharedMemory(rank, sockets, _agree(share), timeout_seconds)
        except _RefusedError as refused:
            for peer in sockets.values():
                peer.close()
            if rank == 0:
                logger.info("gradients travel through gloo: the system has no memory to share (%s)", refused)
            return None


class _RefusedError(Exception):
    """The system refuses something on some rank."""


def _agree(function: Callable[[], T]) -> T:
    """Return what a function returns, if it succeeds on every rank. Collective.

    Raises:
        _RefusedError: on all ranks, if the system refuses it on some.
    """
    made, error = None, ""
    try:
        made = function()
    except (OSError, AttributeError, ValueError) as refused:
        error = text_of(refused)
    if refusals := list(filter(None, all_gather_tree(error, _HOST))):
        raise _RefusedError(refusals[0])
    return cast("T", made)


def _connect(sockets: dict[int, socket.socket], folder: str, rank: int) -> None:
    """Connect a socket to each rank before this one, and send this rank's number."""
    for other in range(rank):
        peer = sockets[other] = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)  # a queue that is full is refused, and not waited for
        peer.connect(f"{folder}/{other}")
        peer.setblocking(True)
        peer.sendall(_RANK.pack(rank))


def _accept(sockets: dict[int, socket.socket], listener: socket.socket, world_size: int) -> None:
    """Accept the sockets of all ranks after this one, which have connected."""
    while len(sockets) < world_size - 1:
        caller, _ = listener.accept()
        sockets[_RANK.unpack(caller.recv(_RANK.size))[0]] = caller
