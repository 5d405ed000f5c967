"""A store of its own for each test, and channels to it."""

import socket
from dataclasses import replace

import torch.distributed as dist

from lanewise.processes.watch.channel import Beat, Channel
from lanewise.processes.watch.process import process_table
from lanewise.processes.watch.store import TimedStore
from lanewise.processes.world.environment import Environment


def make_store() -> tuple[dist.TCPStore, int]:
    """Return a store of this process, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


_kept: list[dist.TCPStore] = []
"""A store ends with its object."""


def make_channels(world_size: int) -> list[Channel]:
    """Return a channel for each rank, in the first start."""
    store, port = make_store()
    _kept.append(store)
    return [
        Channel(TimedStore(store.clone(), f"127.0.0.1:{port}"), world_size, rank)
        for rank in range(world_size)
    ]


def make_environment(port: int, rank: int, world_size: int, **further: bool) -> Environment:
    """Return the place of a rank."""
    place = Environment(rank, rank, world_size, world_size, "127.0.0.1", port, has_agent_store=True)
    return replace(place, **further)


def make_beat(number: int = 1, **changes: object) -> Beat:
    """Return a heartbeat of a process that does not exist."""
    fields: dict[str, object] = {
        "number": number,
        "host": "gpu-a",
        "pid": 2**22 + 1,
        "table": process_table(),
        "note": ("forward", 17, 3),
        "age_seconds": 1.0,
        "limit_seconds": 300.0,
    }
    return Beat(**{**fields, **changes})  # type: ignore[arg-type]
