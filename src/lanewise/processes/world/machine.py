"""Lets one process of each machine run first: it downloads files, and the others find them."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lanewise.errors import WorldError, text_of
from lanewise.processes.world.environment import Environment

_DONE = "done"
_SECONDS_BETWEEN_QUESTIONS = 0.1
_SECONDS_AFTER_A_FAILURE = 2.0
"""Of several failures the first one is shown, so the process whose block failed is to be the first."""
_uses = itertools.count()


@contextmanager
def local_rank_zero_first() -> Iterator[None]:
    """Let local rank 0 of each machine run a block first, and then the other processes of the machine.

        with lanewise.local_rank_zero_first():
            dataset = load_dataset("squad")     # the first one downloads, the others find it in the cache

    Each process runs the block once, and a process alone just runs it. The processes meet at the store of
    torch's process group, and nothing is left on a disk: call it in the methods of a `Task`, or after
    `Lanes` was made. The first one may take any time.

    Collective on each machine: all processes of a machine must enter it, equally often. Blocks must not
    contain collectives, nor each other.

    Raises:
        WorldError: on the others, if the block failed on local rank 0; or the processes have not met yet.
    """
    environment = Environment.from_env(os.environ)
    if environment is None or environment.local_world_size == 1:
        yield
        return
    if not dist.is_initialized():
        raise WorldError(
            "local_rank_zero_first was entered before the processes met: got LOCAL_WORLD_SIZE="
            f"{environment.local_world_size} and no process group. Make Lanes before it, or enter it in a "
            "method of the Task."
        )
    key = f"lanewise/machine/{environment.machine}/{next(_uses)}"
    # torch has no public name for its store.
    store = dist.PrefixStore(key, dist.distributed_c10d._get_default_store())  # noqa: SLF001
    if environment.local_rank:
        _wait(store)
        yield
        return
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # the store may be gone, and the block's own error matters more
            store.set("outcome", f"{type(error).__name__}: {text_of(error)}")
        raise
    store.set("outcome", _DONE)


def _wait(store: dist.Store) -> None:
    """Wait until local rank 0 has run its block.

    Raises:
        WorldError: if the block failed there, or the store is gone with the process that keeps it.
    """
    try:
        while not store.check(["outcome"]):  # not store.wait, which would keep other threads from the store
            time.sleep(_SECONDS_BETWEEN_QUESTIONS)
        outcome = store.get("outcome").decode()
    except RuntimeError as error:
        raise WorldError(
            "the processes lost their connection while one waited in local_rank_zero_first. "
            "Look at what another rank said first."
        ) from error
    if outcome != _DONE:
        time.sleep(_SECONDS_AFTER_A_FAILURE)
        raise WorldError(
            f"the block of local_rank_zero_first failed on local rank 0, so it is not run here: {outcome}"
        )
