"""Memory that processes share: nobody reads what is not written, or overwrites what is not read."""

import logging
import os
import random
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from lanewise.errors import WorldError
from lanewise.testing import run_distributed
from lanewise.world import shared_memory
from lanewise.world.shared_memory import SharedMemory, share_memory
from lanewise.world.world import World


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
            memory.meet()
            dawdle()
            wrong += int((blocks[:, :100] != (ranks + number)[:, None]).sum())
        for wait, index in gathers:
            dawdle()
            wrong += int((wait() != (ranks + 10.0 * number + 0.5 * index)[:, None]).sum())
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_reads_what_the_others_wrote_however_late_they_are(world_size):
    assert run_distributed(exchange_and_gather, world_size, 150) == [0] * world_size


def gather_without_meeting(world: World) -> int:
    """Gather as above, but take every meeting for done."""
    assert world.shared_memory is not None
    SharedMemory.meet = lambda _self: None  # type: ignore[method-assign]
    return exchange_and_gather(world, 50)


def test_that_comparison_finds_what_is_read_too_early():
    assert any(run_distributed(gather_without_meeting, 2))


def wait_for_the_dead(world: World) -> tuple[str, float]:
    """Wait in a meeting for rank 1, which is killed before it comes."""
    memory = world.shared_memory
    assert memory is not None
    memory.meet()
    if world.rank == 1:
        memory.blocks(torch.float32)[1, :5] = 1.0
        for peer in memory._sockets.values():
            peer.shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that is killed
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        memory.meet()
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_ends_leaves_nobody_waiting():
    for rank, (message, seconds) in enumerate(run_distributed(wait_for_the_dead, 3)):
        if rank != 1:
            assert message == "rank 1 ended while this one waited for it. Its own error says why."
            assert seconds < 5


def wait_for_the_late(world: World) -> str:
    shared_memory.default_pg_timeout = timedelta(seconds=1)
    memory = share_memory()
    assert memory is not None
    if world.rank == 1:
        time.sleep(2)
        return ""
    with pytest.raises(WorldError) as caught:
        memory.meet()
    return str(caught.value)


def test_waiting_ends_after_torchs_timeout():
    message, _ = run_distributed(wait_for_the_late, 2)
    assert message == "rank 1 did not come to an exchange of gradients within 1 s."


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


def share_beside_a_stranger(world: World, said: bytes) -> bool:
    """Call rank 0 with a wrong token before anybody else does."""

    class Socket(socket.socket):
        def listen(self, backlog: int = 0) -> None:
            super().listen(backlog)
            stranger = self.stranger = socket.socket(socket.AF_UNIX)  # stays on the line
            stranger.connect(self.getsockname())
            stranger.sendall(said)

    if world.rank == 0:
        shared_memory.socket.socket = Socket  # type: ignore[misc]
    memory = share_memory()
    assert memory is not None
    memory.meet()
    return bool((memory.start_all_gather(torch.tensor(world.rank))() == torch.arange(2)).all())


@pytest.mark.parametrize("said", [bytes(64), b""])
def test_a_stranger_who_calls_is_not_answered(said):
    assert run_distributed(share_beside_a_stranger, 2, said) == [True, True]
