"""The least of what the machine, the container and the process's limit leave."""

import resource

import pytest
import torch

from lanewise.processes.device.free_memory import free_bytes

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


VERSION_2 = ("0::", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
VERSION_1 = (
    "4:cpu,memory:",
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


@pytest.mark.parametrize("version", [VERSION_2, VERSION_1])
@pytest.mark.parametrize(
    ("own", "limited"),
    [
        ("/", ""),
        ("/docker/123", ""),  # which the container sees as the outermost one
        ("/jobs/7", "jobs/7"),  # it was read at the mount's root alone
        ("/jobs/7/tasks/1", "jobs/7"),
    ],
)
def test_a_cgroup_has_a_limit_of_its_own(root, version, own, limited):
    begin, mount, limit, used, cache = version
    write(root / "proc/self/cgroup", f"9:name=systemd:/a:b\n{begin}{own}\n")
    folder = root / mount / limited
    write(folder / used, 20 * MIB)
    write(folder / limit, 80 * MIB)
    assert free_bytes(CPU, 2, root) == 30 * MIB
    write(folder / limit, 10 * MIB)
    assert free_bytes(CPU, 2, root) == 0
    write(folder / "memory.stat", f"anon 5\n{cache} {14 * MIB}\n")  # files that nobody holds
    assert free_bytes(CPU, 2, root) == 2 * MIB


def test_a_cgroup_without_a_limit(root):
    write(root / "proc/self/cgroup", "0::/jobs\n")
    write(root / "sys/fs/cgroup/jobs/memory.max", "max\n")
    write(root / "sys/fs/cgroup/jobs/memory.current", 20 * MIB)
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
