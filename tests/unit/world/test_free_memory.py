"""The least of what the machine, the container and the process's limit leave."""

import resource

import pytest
import torch

from lanewise.world.free_memory import free_bytes

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20


@pytest.fixture
def root(tmp_path):
    """A file system in which the machine has 100 MiB left, and the process takes 30."""
    for path, content in {
        "proc/meminfo": f"MemTotal: {200 * KIB} kB\nMemAvailable: {100 * KIB} kB\n",
        "proc/self/status": f"VmPeak: {50 * KIB} kB\nVmSize: {30 * KIB} kB\n",
    }.items():
        write(tmp_path / path, content)
    return tmp_path


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(content))


def test_processes_share_the_machine(root):
    assert free_bytes(CPU, 1, root) == 100 * MIB
    assert free_bytes(CPU, 4, root) == 25 * MIB


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ],
)
def test_a_container_has_a_limit_of_its_own(root, limit, used):
    write(root / used, 20 * MIB)
    write(root / limit, 80 * MIB)
    assert free_bytes(CPU, 2, root) == 30 * MIB
    write(root / limit, 10 * MIB)
    assert free_bytes(CPU, 2, root) == 0


def test_a_container_without_a_limit(root):
    write(root / "sys/fs/cgroup/memory.max", "max\n")
    write(root / "sys/fs/cgroup/memory.current", 20 * MIB)
    assert free_bytes(CPU, 1, root) == 100 * MIB


def test_a_process_has_a_limit_that_it_shares_with_nobody(root, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (70 * MIB, -1))
    assert free_bytes(CPU, 2, root) == 40 * MIB


def test_where_nobody_tells(tmp_path, monkeypatch):
    assert free_bytes(CPU, 1, tmp_path) is None
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (7 * MIB, 9 * MIB))
    assert free_bytes(torch.device("cuda:0"), 5, tmp_path) == 7 * MIB
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert free_bytes(torch.device("mps"), 1, tmp_path) is None
