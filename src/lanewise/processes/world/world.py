"""The processes of a run and the few collectives that the engine needs of them."""

import gc
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist

from lanewise.errors import WorldError
from lanewise.processes.device.accelerator import set_current_device, side_stream, start_copy_to_host
from lanewise.processes.world.environment import Environment
from lanewise.processes.world.shared_memory import SharedMemory, share_memory
from lanewise.processes.world.tree_message import all_gather_single, all_gather_tree, gather_tree

_SECONDS_BETWEEN_QUESTIONS = 0.02
_FOR_EVER = timedelta(days=1000)
_BROADCAST_BYTES = 2**25
"""How much of several tensors travels at once."""


@final
@dataclass(eq=False)
class GroupWorld:
    """The processes of torch's default process group."""

    device: torch.device
    """Of this process."""
    store: dist.Store
    """The one that the group was initialised with."""
    shared_memory: SharedMemory | None
    """Of CPU processes that are all on one machine; None elsewhere, and where the system refuses it."""
    is_restarted: bool = False
    """Whether an earlier start of the same launch may have begun the run; the same on every rank."""

    def __post_init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._first = dist.PrefixStore("lanewise/first", self.store)
        self._told = dist.PrefixStore("lanewise/told", self.store)
        self._is_on_host = dist.get_backend() == "gloo"
        self._sends_from = torch.device("cpu") if self._is_on_host else self.device

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a tensor to every rank. Collective: every rank must call this, with equal shapes and dtypes.

        Returns:
            A function that waits and returns the ranks' tensors, stacked: [world_size, *tensor.shape].
        """
        if self.shared_memory is not None and self.shared_memory.can_gather(tensor):
            return self.shared_memory.start_all_gather(tensor)
        sent = tensor.cpu() if self._is_on_host else tensor  # gloo gathers tensors of the CPU only
        gathered = sent.new_empty((self.world_size, *sent.shape))
        work = all_gather_single(gathered.view(-1), sent.contiguous().view(-1), async_op=True)

        def wait() -> torch.Tensor:
            assert work is not None
            work.wait()
            return gathered.to(tensor.device)

        return wait

    def start_all_gather_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a small tensor to every rank's CPU. Collective, as `start_all_gather`.

        Waiting for the result waits for what was enqueued on the device before, not for what comes after.
        """
        if self._is_on_host:
            return self.start_all_gather(tensor.cpu())
        with side_stream(tensor.device):
            return start_copy_to_host(self.start_all_gather(tensor)())

    def all_gather_tree(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective: every rank must call this. For start-up.

        Args:
            value: tensors, numbers, text, None, and lists, tuples and mappings of them. What arrives are
                plain lists, tuples and dicts, and tensors in host memory; one process gets its own value.

        Raises:
            WorldError: if there is anything else in a value, or what arrives is no message.
        """
        return all_gather_tree(value, self._sends_from)

    def gather_tree(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, None elsewhere. Collective, as `all_gather_tree`."""
        return gather_tree(value, self._sends_from)

    def broadcast_tree(self, value: Any) -> Any:
        """Return rank 0's value, which is small, on every rank. Collective, as `all_gather_tree`."""
        return self.all_gather_tree(value if self.rank == 0 else None)[0]

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite tensors, of any strides, by those of a rank. Collective: every rank must call this."""
        if not tensors:  # which torch refuses
            return
        group = dist.group.WORLD
        assert group is not None
        # As DDP sends its initial weights; `dist.broadcast` mistakes a sliced tensor for a contiguous one.
        dist._broadcast_coalesced(group, list(tensors), _BROADCAST_BYTES, source)  # noqa: SLF001

    def num_collectives(self) -> int:
        """Count the collectives that this process has begun so far, of all groups. No collective."""
        groups: Any = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - no public list of the groups
        return sum(
            group._get_sequence_number_for_group()  # noqa: SLF001 - nor a count
            for group in groups
            if dist.get_backend(group) in ("gloo", "nccl")  # others may raise
        )

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Open a second channel between some ranks. Collective: every rank must call this.

        Returns:
            None on the other ranks.
        """
        group: dist.ProcessGroup = dist.new_group(list(ranks))
        return group if self.rank in ranks else None

    def is_first(self, key: str) -> bool:
        """Tell whether this is the first call with this key, of all ranks. No collective."""
        try:
            return self._first.add(hashlib.sha256(key.encode()).hexdigest(), 1) == 1
        except RuntimeError:  # the process that keeps the store is gone: its own error was shown
            return False

    def tell(self, key: str, text: str) -> None:
        """Leave a text for `hear`. No collective; any thread may call this."""
        self._told.set(f"{key}/{self.rank}", text)

    def hear(self, key: str, ranks: Sequence[int], timeout_seconds: float) -> list[str]:
        """Wait for the texts that some ranks left under a key. No collective; any thread may call this.

        Raises:
            WorldError: if some of the ranks left none in time; names those ranks.
        """
        keys = [f"{key}/{rank}" for rank in ranks]
        deadline = time.monotonic() + timeout_seconds
        # Not store.wait: it would keep other threads from the store.
        while not self._told.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank in ranks if not self._told.check([f"{key}/{rank}"])]
                raise WorldError(f"ranks {missing} did not answer within {timeout_seconds:.0f} s ({key}).")
            time.sleep(_SECONDS_BETWEEN_QUESTIONS)
        return [self._told.get(place).decode() for place in keys]

    def close(self) -> None:
        """Leave the world. The others need not do so at the same time."""
        if self.shared_memory is not None:
            self.shared_memory.close()
        dist.destroy_process_group()
        gc.collect()  # what belongs to a process group must be gone before the interpreter ends


@final
class LocalWorld:
    """One process alone: every collective is the identity."""

    rank = 0
    world_size = 1
    shared_memory: SharedMemory | None = None

    def __init__(self, device: torch.device, *, is_restarted: bool = False) -> None:
        self.device = device
        self.is_restarted = is_restarted
        self._keys: set[str] = set()
        self._told: dict[str, str] = {}

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor.unsqueeze(0)

    def start_all_gather_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return start_copy_to_host(tensor.unsqueeze(0))

    def all_gather_tree(self, value: Any) -> list[Any]:
        return [value]

    def gather_tree(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_tree(self, value: Any) -> Any:
        return value

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """One process has them."""

    def num_collectives(self) -> int:
        return 0

    def new_group(self, ranks: Sequence[int]) -> None:
        """One process is in no other group."""

    def is_first(self, key: str) -> bool:
        is_first = key not in self._keys
        self._keys.add(key)
        return is_first

    def tell(self, key: str, text: str) -> None:
        self._told[key] = text

    def hear(self, key: str, ranks: Sequence[int], timeout_seconds: float) -> list[str]:
        return [self._told.pop(key)]

    def close(self) -> None:
        """Nothing is open."""


World: TypeAlias = GroupWorld | LocalWorld
"""All processes of the run, as one of them sees it."""


def join_world(
    environment: Environment,
    devices: Sequence[str],
    backend: str,
    store: dist.Store | None,
    *,
    folder: Path | None = None,
    timeout_seconds: float | None = None,
    is_restarted: bool = False,
) -> World:
    """Meet the other processes.

    Collective: blocks until every rank has called it.

    Args:
        environment: the place of this process.
        devices: the device of each local rank.
        backend: as torch names it.
        store: where the processes meet; None for a process alone.
        folder: for sockets, see `share_memory`.
        timeout_seconds: how long a collective waits for a rank; None: for ever.
        is_restarted: see `GroupWorld`.
    """
    device = torch.device(devices[environment.local_rank])
    set_current_device(device)
    if environment.world_size == 1:
        return LocalWorld(device, is_restarted=is_restarted)
    assert store is not None
    is_one_machine = environment.world_size == environment.local_world_size
    if is_one_machine:
        # All on one machine: gloo need not look up a host name that may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=_FOR_EVER if timeout_seconds is None else timedelta(seconds=timeout_seconds),
    )
    memory = None
    if is_one_machine and backend == "gloo" and device.type == "cpu":
        memory = share_memory(folder, timeout_seconds)
    return GroupWorld(device, store, memory, is_restarted)
