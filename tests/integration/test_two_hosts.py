"""torchrun on two hosts: two network namespaces with nothing in common but a cable."""

import os
import shutil
import subprocess
import uuid
from contextlib import ExitStack

import pytest

from tests.integration.command import BIN, Cold, train, write_config

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="making network namespaces needs root and iproute2",
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def hosts():
    """Two namespaces joined by a veth pair: (namespace, address, interface) of each."""
    name = uuid.uuid4().hex[:6]
    ends = [(f"lane-{name}-{end}", f"10.77.0.{end}", f"lw{name}{end}") for end in (1, 2)]
    with ExitStack() as stack:
        for namespace, _, _ in ends:
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "delete", namespace)
        ip("link", "add", ends[0][2], "type", "veth", "peer", "name", ends[1][2])
        for namespace, address, interface in ends:
            ip("link", "set", interface, "netns", namespace)
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", namespace, "link", "set", interface, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield ends


def start(hosts, node_rank: int, processes_each: int, *arguments: object) -> Cold:
    namespace, _, interface = hosts[node_rank]
    torchrun = [str(BIN / "torchrun"), "--nnodes", "2", "--node-rank", str(node_rank)]
    torchrun += ["--master-addr", hosts[0][1], "--master-port", "29400"]
    torchrun += ["--nproc-per-node", str(processes_each)]
    command = ["ip", "netns", "exec", namespace, *torchrun, "-m", "lanewise", "train", *arguments]
    return Cold(*command, variables={"GLOO_SOCKET_IFNAME": interface})


@pytest.mark.parametrize("processes_each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_on_two_hosts_leave_the_model_of_one(hosts, tmp_path, processes_each):
    config = write_config(tmp_path)
    train(config, "--train.run_dir", tmp_path / "one").require_success()
    two = ("--train.run_dir", tmp_path / "two")
    with start(hosts, 0, processes_each, config, *two) as first:
        with start(hosts, 1, processes_each, config, *two) as second:
            second_done = second.finish()
        first_done = first.finish()
    first_done.require_success()
    second_done.require_success()
    model = (tmp_path / "two" / "model.safetensors").read_bytes()
    assert model == (tmp_path / "one" / "model.safetensors").read_bytes()
    assert f"{2 * processes_each} processes on cpu" in first_done.stderr + second_done.stderr
