"""Runs a function in several processes, each on a device of its own: an emulated one, or a real one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lanewise.launch.scratch import scratch_folder
from lanewise.processes.world.world import GroupWorld, LocalWorld, World
from lanewise.testing import run_distributed
from tests.fake_device.build import build
from tests.fake_device.device import DEVICE, NUM_DEVICES, register


@dataclass(frozen=True)
class Ended:
    """What a rank returned, and how often its host waited for the device, by the kind of call."""

    value: Any
    waits: dict[str, int]


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    order: str = "now",
    device_type: str = DEVICE,
) -> list[Ended]:
    """Call `function(world, *args)` in `world_size` new processes; return what each rank ended with.

    Args:
        function: as for `run_distributed`.
        world_size: how many processes; each has the device with the number of its rank.
        args: picklable.
        order: in which work of emulated devices runs, see `register`.
        device_type: that of the devices; a type that torch ships needs one for each process.
    """
    if device_type == DEVICE:
        build()  # not in the processes, which have less time
    with scratch_folder() as folder:
        place = f"{folder}/store"
        ended = run_distributed(
            _call,
            world_size,
            place,
            order,
            device_type,
            function,
            args,
            one_machine=False,
            timeout_seconds=500.0,
        )
    return [Ended(*one) for one in ended]


def _call(
    world: World, place: str, order: str, device_type: str, function: Callable[..., Any], args: Any
) -> Any:
    """Leave the world of the CPU, and call the function in one of the devices."""
    if device_type == DEVICE:
        register(order).set_num_devices(NUM_DEVICES)
    device = torch.device(device_type, world.rank)
    torch.accelerator.set_device_index(device)
    new: World = LocalWorld(device)
    if world.world_size > 1:
        world.close()
        store = dist.FileStore(place, world.world_size)
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size)
        new = GroupWorld(device, store, None)
    value = function(new, *args)
    return value, getattr(torch.get_device_module(device), "waits", dict)()
