"""How much more memory a process may take."""

import resource
from collections.abc import Iterator
from pathlib import Path

import torch

_CGROUPS = (  # version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes(device: torch.device, num_processes: int, root: Path = Path("/")) -> int | None:
    """Return how many bytes tensors of this process may take besides those that it has.

    Args:
        device: an accelerator: what it has free; the CPU: the least of its share of the machine's memory and
            of the container's (cgroup), and of what RLIMIT_AS leaves.
        num_processes: how many share the machine's memory.
        root: of the file system.

    Returns:
        None where nobody tells.
    """
    if device.type != "cpu":
        try:
            return int(torch.accelerator.get_memory_info(device)[0])
        except (AttributeError, RuntimeError):  # as on mps, or torch before 2.9
            return None
    return min(_host_bytes(root, num_processes), default=None)


def _host_bytes(root: Path, num_processes: int) -> Iterator[int]:
    if (available := _read_kib(root / "proc/meminfo", "MemAvailable:")) is not None:
        yield available // num_processes
    for maximum, used in _CGROUPS:
        try:
            limit = (root / maximum[1:]).read_text().strip()
            if limit != "max":
                yield max(0, int(limit) - int((root / used[1:]).read_text())) // num_processes
        except OSError:
            continue
    limit_of_process, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _read_kib(root / "proc/self/status", "VmSize:")
    if limit_of_process != resource.RLIM_INFINITY and taken is not None:
        yield max(0, limit_of_process - taken)


def _read_kib(path: Path, name: str) -> int | None:
    """Return a number of KiB from a file of the kernel, in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
