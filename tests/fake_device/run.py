"""Runs a function in several processes, each on an emulated device of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lanewise.launch.scratch import scratch_folder
from lanewise.processes.world.world import GroupWorld, LocalWorld, World
from lanewise.testing import run_distributed
from tests.fake_device.build import build
from tests.fake_device.device import DEVICE, register

NUM_DEVICES = 4


@dataclass(frozen=True)
class Ended:
    """What a rank returned, and how often its host waited for the device, by the kind of call."""

    value: Any
    waits: dict[str, int]


def run(function: Callable[..., Any], world_size: int, *args: Any, order: str = "now") -> list[Ended]:
    """Call `function(world, *args)` in `world_size` new processes; return what each rank ended with.

    Args:
        function: as for `run_distributed`.
        world_size: how many processes; each has the device with the number of its rank.
        args: picklable.
        order: in which work runs, see `register`.
    """
    build()  # not in the processes, which have less time
    with scratch_folder() as folder:
        place = f"{folder}/store"
        ended = run_distributed(_call, world_size, place, order, function, args, one_machine=False)
    return [Ended(*one) for one in ended]


def _call(world: World, place: str, order: str, function: Callable[..., Any], args: Any) -> Any:
    """Leave the world of the CPU, and call the function in one of the devices."""
    module = register(order)
    module.set_num_devices(NUM_DEVICES)
    device = torch.device(DEVICE, world.rank)
    torch.accelerator.set_device_index(device)
    if world.world_size == 1:
        return function(LocalWorld(device), *args), module.waits()
    world.close()
    store = dist.FileStore(place, world.world_size)
    dist.init_process_group(DEVICE, store=store, rank=world.rank, world_size=world.world_size)
    return function(GroupWorld(device, store, None), *args), module.waits()
