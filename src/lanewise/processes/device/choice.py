"""Finds the devices of the machine, and chooses those of a run and its backend, without using a device."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lanewise.errors import ConfigError


def count_accelerators(device_type: str = "auto") -> int:
    """Count the devices of a type that torch can use here.

    Args:
        device_type: `auto` for any accelerator; 0 is returned for `cpu`.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device_type not in ("auto", accelerator.type):
        return 0
    return torch.accelerator.device_count()  # of CUDA through NVML: opens no context


def accelerator_type() -> str | None:
    """Return the type of the devices besides the CPU that torch can use here; None if there are none."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None or not count_accelerators() else accelerator.type


def choose_devices(device_type: str, num_devices: int, names: Sequence[str] = ()) -> list[str]:
    """Replace `auto`, and make sure that the machine has the devices.

    Args:
        device_type: `auto` (the accelerator if there is one), `cpu`, or the type of an accelerator.
        num_devices: how many this machine is to use.
        names: the name of each, such as `xpu:1` or `auto:1`; empty: the first ones, or the CPU for each.

    Returns:
        The name of each device, in the order of the local ranks.

    Raises:
        ConfigError: if the machine lacks a device.
    """
    there = accelerator_type()
    if names:
        device_type = names[0].partition(":")[0]
    if device_type == "auto":
        device_type = there or "cpu"
    numbers = [name.partition(":")[2] for name in names] or [str(index) for index in range(num_devices)]
    if device_type == "cpu":
        if names and any(numbers):
            raise ConfigError(
                f"distributed.devices numbers the devices of an accelerator: got [{', '.join(numbers)}], and "
                f"this run is for the CPU. Use --distributed.devices {len(numbers)}, for as many processes."
            )
        return ["cpu"] * len(numbers)
    devices = [f"{device_type}:{number}" for number in numbers]
    count = count_accelerators(device_type)
    if not count:
        has = f"there are {count_accelerators()} of the type {there}" if there else "there is only the CPU"
        raise ConfigError(
            f"distributed asks for devices of the type {device_type}, but torch finds none here: "
            f"{has}. Use --distributed.device_type {there or 'cpu'}."
        )
    missing = [name for name in devices if int(name.partition(":")[2]) >= count]
    if not missing:
        return devices
    has = f"there {'is' if count == 1 else 'are'} {count}"
    if names:
        raise ConfigError(
            f"distributed.devices names {missing[0]}, which this machine lacks: {has}, "
            f"{device_type}:0 to {device_type}:{count - 1}. Name one of these."
        )
    raise ConfigError(
        f"distributed.devices asks for more {device_type} devices than this machine has: got {len(devices)}, "
        f"{has}. Use --distributed.devices {count}, or --distributed.device_type cpu."
    )


def choose_backend(backend: str, devices: Sequence[str], world_size: int) -> str:
    """Replace `auto`, and make sure that the backend can connect processes on these devices.

    Args:
        backend: `auto` (torch's choice for the type of device), `gloo` or `nccl`.
        devices: the device of each local rank.
        world_size: processes of the run; a single one needs no backend.

    Returns:
        The name under which torch knows the backend.

    Raises:
        ConfigError: if the backend serves no devices of this type.
    """
    device_type = devices[0].partition(":")[0]
    is_shared = device_type != "cpu" and len(set(devices)) < len(devices)
    if backend != "auto":
        if not _serves(backend, device_type):
            raise ConfigError(
                f"distributed.backend {backend} cannot be used with devices of the type {device_type}. "
                "Use --distributed.backend auto."
            )
        return backend
    try:
        # Only gloo lets processes share a device.
        chosen = "gloo" if is_shared else dist.get_default_backend_for_device(device_type)
    except ValueError:
        chosen = "gloo"
    if world_size > 1 and not _serves(chosen, device_type):
        raise ConfigError(
            f"torch has no backend that connects processes on {device_type} devices"
            f"{', several on one' if is_shared else ''}: got {world_size} processes. "
            f"Use {'one process for each device' if is_shared else 'one process'}, "
            "or --distributed.device_type cpu."
        )
    return chosen


def _serves(backend: str, device_type: str) -> bool:
    return device_type in dist.Backend.backend_capability.get(backend, [])
