"""torchrun on two hosts: two network namespaces with nothing in common but a cable."""

import pytest

from tests.integration.command import BIN, Cold, train, write_config
from tests.integration.hosts import WHY_NOT, running_hosts

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture
def hosts():
    with running_hosts() as running:
        yield running


def start(hosts, node_rank: int, processes_each: int, *arguments: object) -> Cold:
    torchrun = [str(BIN / "torchrun"), "--nnodes", "2", "--node-rank", str(node_rank)]
    torchrun += ["--master-addr", hosts[0].address, "--master-port", "29400"]
    torchrun += ["--nproc-per-node", str(processes_each)]
    command = hosts[node_rank].enter(*torchrun, "-m", "lanewise", "train", *arguments)
    return Cold(*command, variables={"GLOO_SOCKET_IFNAME": hosts[node_rank].interface})


@pytest.mark.slow
@pytest.mark.parametrize("processes_each", [1, 2])
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
