"""Which kind of device and which backend a run uses; asks for GPUs without touching one."""

import torch

from lanewise.errors import ConfigError


def choose_device(device_type: str, backend: str, processes_per_machine: int) -> tuple[str, str]:
    """Settle `auto` and make sure that the machine has what is asked for.

    Args:
        device_type: `auto` (GPUs if there are any), `cpu` or `cuda`.
        backend: `auto` (nccl on GPUs, else gloo), `gloo` or `nccl`.
        processes_per_machine: processes on this machine; each takes one GPU.

    Returns:
        The device type and the backend.

    Raises:
        ConfigError: if there are fewer GPUs than processes.
    """
    num_gpus = torch.cuda.device_count()  # through NVML: opens no context
    if device_type == "auto":
        device_type = "cuda" if num_gpus else "cpu"
    if device_type == "cpu" and backend == "nccl":
        raise ConfigError(
            "distributed.backend nccl needs GPUs, and this machine has none that torch can use. "
            "Use --distributed.backend gloo."
        )
    if device_type == "cuda" and processes_per_machine > num_gpus:
        raise ConfigError(
            f"distributed.devices asks for more GPUs than this machine has: got {processes_per_machine}, "
            f"there {'is' if num_gpus == 1 else 'are'} {num_gpus}. "
            f"Use --distributed.devices {num_gpus}, or --distributed.device_type cpu."
            if num_gpus
            else f"distributed.device_type is cuda, for {processes_per_machine} GPU(s), but this machine "
            "has no GPU that torch can use. Use --distributed.device_type cpu."
        )
    if backend == "auto":
        backend = "nccl" if device_type == "cuda" else "gloo"
    return device_type, backend
