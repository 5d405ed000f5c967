"""Memory that processes share: nobody reads what is not written, or overwrites what is not read."""

import logging
import os
import random
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lanewise.errors import WorldError
from lanewise.processes.world import shared_memory
from lanewise.processes.world.shared_memory import SharedMemory, share_memory
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed


def exchange_and_gather(world: World, num_rounds: int) -> int:
    """Exchange and gather in a fixed order, with ranks that are late here and there; count what is wrong."""
    memory = world.shared_memory
    assert memory is not None
    order, late = random.Random(0), random.Random(world.rank)
    ranks, wrong = torch.arange(world.world_size, dtype=torch.float64), 0

    def dawdle() -> None:
        if late.random() < 0.2:
            time.sleep(late.random() * 2e-3)

    for number in range(num_rounds):
        gathers = [
            (memory.start_all_gather(torch.full((3,), world.rank + 10.0 * number + 0.5 * index)), index)
            for index in range(order.randint(0, 2))
        ]
        for _ in range(order.randint(0, 2)):
            blocks = memory.blocks(torch.float64)
            dawdle()
            blocks[memory.rank, :100] = memory.rank + number
            memory.barrier()
            dawdle()
            wrong += int((blocks[:, :100] != (ranks + number)[:, None]).sum())
        for wait, index in gathers:
            dawdle()
            wrong += int((wait() != (ranks + 10.0 * number + 0.5 * index)[:, None]).sum())
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_reads_what_the_others_wrote_however_late_they_are(world_size):
    assert run_distributed(exchange_and_gather, world_size, 150) == [0] * world_size


def gather_without_barrier(world: World) -> int:
    """Gather as above, but take every barrier for done."""
    assert world.shared_memory is not None
    SharedMemory.barrier = lambda _self: None  # type: ignore[method-assign]
    return exchange_and_gather(world, 50)


def test_that_comparison_finds_what_is_read_too_early():
    assert any(run_distributed(gather_without_barrier, 2))


def wait_for_the_dead(world: World) -> tuple[str, float]:
    """Wait at a barrier for rank 1, which is killed before it comes."""
    memory = world.shared_memory
    assert memory is not None
    memory.barrier()
    if world.rank == 1:
        memory.blocks(torch.float32)[1, :5] = 1.0
        for peer in memory._sockets.values():
            peer.shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that is killed
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        memory.barrier()
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_ends_leaves_nobody_waiting():
    for rank, (message, seconds) in enumerate(run_distributed(wait_for_the_dead, 3)):
        if rank != 1:
            assert message == "rank 1 ended while this one waited for it. Its own error says why."
            assert seconds < 60  # the time limit of an exchange is longer


def wait_for_the_late(world: World) -> str:
    memory = share_memory(timeout_seconds=1)
    assert memory is not None
    if world.rank == 1:
        world.hear("given up", [0], 60)
        return ""
    with pytest.raises(WorldError) as caught:
        memory.barrier()
    world.tell("given up", "given up")
    return str(caught.value)


def test_waiting_ends_after_a_time():
    message, _ = run_distributed(wait_for_the_late, 2)
    assert message == "rank 1 did not come to an exchange within 1 s."


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.lines.append(record.getMessage())


class Refusing(socket.socket):
    """A socket whose methods may be replaced."""


def share_where_one_is_refused(world: World, refused: str) -> tuple[bool, list[str]]:
    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    if world.rank == world.world_size - 1:
        owner, name = {
            "memfd_create": (os, "memfd_create"),
            "connect": (Refusing, "connect"),
            "mmap": (shared_memory.mmap, "mmap"),
        }[refused]
        shared_memory.socket.socket = Refusing  # type: ignore[misc]
        setattr(owner, name, refuse)
    kept = Lines()
    logging.getLogger("lanewise").addHandler(kept)
    logging.getLogger("lanewise").setLevel(logging.INFO)
    return share_memory() is None, kept.lines


@pytest.mark.parametrize("refused", ["memfd_create", "connect", "mmap"])
def test_where_one_rank_is_refused_none_has_it_and_a_line_says_so(refused):
    """Nor does anybody wait for the one that cannot connect."""
    first, *others = run_distributed(share_where_one_is_refused, 3, refused)
    line = "gradients travel through gloo: the system has no memory to share ({})"
    assert first == (True, [line.format("[Errno 28] No space left on device")])
    assert others == [(True, []), (True, [])]


def share_and_look(world: World) -> list[tuple[int, int, bool]]:
    """Return owner and mode of the folder of each socket that listened, and whether it is there still."""
    folders = []

    class Socket(socket.socket):
        def listen(self, backlog: int = 0) -> None:
            super().listen(backlog)
            folder = Path(self.getsockname()).parent.resolve()
            folders.append((folder, folder.stat()))

    shared_memory.socket.socket = Socket  # type: ignore[misc]
    assert share_memory() is not None
    world.all_gather_tree(None)  # rank 0 has removed it
    return [(found.st_uid, stat.S_IMODE(found.st_mode), folder.exists()) for folder, found in folders]


def test_no_other_user_can_call():
    assert run_distributed(share_and_look, 2) == [[(os.getuid(), 0o700, False)]] * 2


def share_where_calls_wait(_: World) -> bool:
    """Fill the queue of every socket with calls that nobody answers."""
    callers = []

    class Socket(socket.socket):
        def listen(self, _: int = 0) -> None:
            super().listen(0)
            with suppress(BlockingIOError):
                while True:
                    callers.append(socket.socket(socket.AF_UNIX))
                    callers[-1].setblocking(False)
                    callers[-1].connect(self.getsockname())

    shared_memory.socket.socket = Socket  # type: ignore[misc]
    return share_memory() is None


def test_a_queue_that_is_full_keeps_nobody_waiting():
    assert run_distributed(share_where_calls_wait, 2, timeout_seconds=30) == [True, True]
