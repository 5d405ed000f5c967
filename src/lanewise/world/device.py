"""Which devices and which backend a run uses; asks for GPUs without touching one."""

from collections.abc import Sequence

import torch

from lanewise.errors import ConfigError


def choose_devices(
    device_type: str, backend: str, processes_per_machine: int, names: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Settle `auto` and make sure that the machine has what is asked for.

    Args:
        device_type: `auto` (GPUs if there are any), `cpu` or `cuda`.
        backend: `auto` (nccl on GPUs, else gloo), `gloo` or `nccl`.
        processes_per_machine: processes on this machine.
        names: the device of each of them, such as `cuda:1`; empty: each takes one GPU, or the CPU.

    Returns:
        The device of each local rank, and the backend.

    Raises:
        ConfigError: if the machine lacks a device.
    """
    num_gpus = torch.cuda.device_count()  # through NVML: opens no context
    if names:
        device_type = names[0].partition(":")[0]
    elif device_type == "auto":
        device_type = "cuda" if num_gpus else "cpu"
    if device_type == "cpu" and backend == "nccl":
        raise ConfigError(
            "distributed.backend nccl needs GPUs, and this machine has none that torch can use. "
            "Use --distributed.backend gloo."
        )
    devices = list(names)
    if not devices:
        is_gpu = device_type == "cuda"
        devices = [f"cuda:{rank}" if is_gpu else "cpu" for rank in range(processes_per_machine)]
    if device_type == "cuda":
        _require_gpus(devices, num_gpus, is_named=bool(names))
    if backend == "auto":
        # NCCL refuses two processes on one GPU.
        is_shared = len(set(devices)) < len(devices)
        backend = "gloo" if device_type == "cpu" or is_shared else "nccl"
    return devices, backend


def _require_gpus(devices: Sequence[str], num_gpus: int, *, is_named: bool) -> None:
    missing = [name for name in devices if int(name.partition(":")[2]) >= num_gpus]
    if not missing:
        return
    there = f"there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
    if not num_gpus:
        raise ConfigError(
            f"distributed asks for {len(set(devices))} GPU(s), but this machine has no GPU that torch can "
            "use. Use --distributed.device_type cpu."
        )
    if is_named:
        raise ConfigError(
            f"distributed.devices names {missing[0]}, which this machine lacks: {there}, "
            f"cuda:0 to cuda:{num_gpus - 1}. Name one of these."
        )
    raise ConfigError(
        f"distributed.devices asks for more GPUs than this machine has: got {len(devices)}, {there}. "
        f"Use --distributed.devices {num_gpus}, or --distributed.device_type cpu."
    )
