"""The processes of a run and the few collectives that the engine needs of them."""

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lanewise.world.environment import Environment

# torch 2.13 renamed the collective; the old name warns there, the new one does not exist before.
all_gather_single: Callable[..., dist.Work | None] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)


class World(Protocol):
    """All processes of the run, as one of them sees it."""

    rank: int
    world_size: int
    device: torch.device
    scalar_device: torch.device
    """Where tensors must be for the cheapest collective on a few scalars."""

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a tensor to every rank. Collective: every rank must call this, with equal shapes and dtypes.

        Returns:
            A function that waits and returns the ranks' tensors, stacked: [world_size, *tensor.shape].
        """
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective: every rank must call this. For start-up."""
        ...

    def new_group(self) -> dist.ProcessGroup | None:
        """Open a second channel with the same members. Collective: every rank must call this."""
        ...

    def close(self) -> None:
        """Leave the world. The others need not do so at the same time."""
        ...


class LocalWorld:
    """One process alone: every collective is the identity."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scalar_device = torch.device("cpu")

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `World`."""
        return lambda: tensor.unsqueeze(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `World`."""
        return [value]

    def new_group(self) -> None:
        """See `World`."""

    def close(self) -> None:
        """See `World`."""


class GroupWorld:
    """The processes of torch's default process group, which must be initialised."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.scalar_device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `World`."""
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        work = all_gather_single(gathered.view(-1), tensor.contiguous().view(-1), async_op=True)

        def wait() -> torch.Tensor:
            assert work is not None
            work.wait()
            return gathered

        return wait

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `World`."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def new_group(self) -> dist.ProcessGroup:
        """See `World`."""
        group: dist.ProcessGroup = dist.new_group()
        return group

    def close(self) -> None:
        """See `World`."""
        dist.destroy_process_group()


def join_world(environment: Environment, device_type: str, backend: str) -> World:
    """Meet the other processes.

    Collective: blocks until every rank has called it, for at most torch's default timeout.

    Args:
        environment: the place of this process.
        device_type: `cpu`, or `cuda`: then the process takes the GPU of its local rank.
        backend: `gloo` or `nccl`.
    """
    if device_type == "cuda":
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if environment.world_size == 1:
        return LocalWorld(device)
    if environment.world_size == environment.local_world_size:
        # All on one machine: gloo need not look up a host name that may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, rank=environment.rank, world_size=environment.world_size)
    return GroupWorld(device)
