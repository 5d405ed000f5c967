"""How much more memory a process may take."""

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_CGROUPS = {"memory": _V1, "": _V2}
"""Of each version of cgroups, by its name in /proc/self/cgroup: the folder, and where in it the limit, the
bytes in use and the cache in them are."""


def free_bytes(device: torch.device, num_processes: int, root: Path = Path("/")) -> int | None:
    """Return how many more bytes the tensors of this process may take.

    On an accelerator this is its free memory. On the CPU it is the least of the process's share of the
    machine's memory, its share of what the cgroups leave, and what RLIMIT_AS leaves.

    Args:
        device: where the tensors will be.
        num_processes: how many share the machine's memory.
        root: of the file system.

    Returns:
        None where that is not known.
    """
    if device.type != "cpu":
        try:
            return int(torch.accelerator.get_memory_info(device)[0])
        except (AttributeError, RuntimeError):  # as on mps
            return None
    return min(_host_bytes(root, num_processes), default=None)


def _host_bytes(root: Path, num_processes: int) -> Iterator[int]:
    if (kib := _read(root / "proc/meminfo", "MemAvailable:")) is not None:
        yield kib * 1024 // num_processes
    for free in _bytes_of_cgroups(root):
        yield free // num_processes
    limit_of_process, _ = resource.getrlimit(resource.RLIMIT_AS)
    kib = _read(root / "proc/self/status", "VmSize:")
    if limit_of_process != resource.RLIM_INFINITY and kib is not None:
        yield max(0, limit_of_process - kib * 1024)


def _bytes_of_cgroups(root: Path) -> Iterator[int]:
    """Yield what is left in each cgroup of this process: its own one and those around it.

    In a container its own cgroup may be found as the outermost one, under another path.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        for name in _CGROUPS.keys() & set(controllers.split(",")):
            mount, limit, used, cache = _CGROUPS[name]
            own = Path(path.lstrip("/"))
            for folder in (root / mount / cgroup for cgroup in (own, *own.parents)):
                with suppress(OSError, ValueError):  # it is not there, or "max"
                    free = int((folder / limit).read_text()) - int((folder / used).read_text())
                    yield max(0, free + (_read(folder / "memory.stat", cache) or 0))


def _read(path: Path, name: str) -> int | None:
    """Return the number after a name in a file of the kernel whose lines have names and numbers."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), None)
