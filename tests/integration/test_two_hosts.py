"""torchrun on two hosts: two network namespaces with nothing in common but a cable."""

import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.integration.command import BIN, Cold, train, wait_for, write_config
from tests.integration.failing import wait_for_steps, write_faulty
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


# ------------------------------------------------------------------------------ hosts that come and go


def start_agent(hosts, number: int, config: Path, *, keeper: int) -> Cold:
    """Start torchrun as docs/elastic.md says; the host with the number `keeper` keeps the rendezvous."""
    torchrun = (sys.executable, "-m", "lanewise.launch.torchrun", "--nnodes=1:2", "--nproc-per-node=1")
    command = hosts[number].enter(
        *(*torchrun, "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=digits"),
        *(f"--rdzv-endpoint={hosts[keeper].address}:29400", f"--local-addr={hosts[number].address}"),
        f"--rdzv-conf=is_host={int(number == keeper)},last_call_timeout=5",
        *("-m", "lanewise", "train", config, "--resume"),
    )
    return Cold(*command, variables={"GLOO_SOCKET_IFNAME": hosts[number].interface})


def world_sizes(config: Path) -> list[int]:
    """Return how many processes each start of a run had."""
    record = config.parent / "run" / "run.jsonl"
    lines = map(json.loads, record.read_text().splitlines() if record.exists() else ())
    return [line["world_size"] for line in lines if line["event"] == "start"]


def write_long(folder: Path) -> Path:
    return write_faulty(folder, what="none", rank=None, slow={"forward": 0.3})


def require_undisturbed(config: Path) -> None:
    """Check that the model is that of a run which nobody disturbed."""
    whole = config.parent / "whole"
    train(config, "--train.run_dir", whole, "--task.init_args.slow", "{}").require_success()
    model = (config.parent / "run" / "model.safetensors").read_bytes()
    assert model == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_agent_that_is_lost_and_one_that_comes_leave_the_same_model(hosts, tmp_path):
    config = write_long(tmp_path)
    agent = partial(start_agent, hosts, config=config, keeper=0)
    with agent(0) as first, agent(1) as second:
        wait_for_steps(config)
        for pid in second.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: world_sizes(config) == [2, 1])
        with agent(1) as third:
            third_done = third.finish()
        first.finish().require_success()
    third_done.require_success()
    assert world_sizes(config) == [2, 1, 2]
    require_undisturbed(config)


@pytest.mark.slow
def test_an_agent_that_comes_later_and_becomes_rank_0_goes_on_with_the_run(hosts, tmp_path):
    """It has the lower address; the agent that stays must learn where the new rank 0 is."""
    config = write_long(tmp_path)
    agent = partial(start_agent, hosts, config=config, keeper=1)
    with agent(1) as first:
        wait_for_steps(config)
        with agent(0) as second:
            second_done = second.finish()
        first.finish().require_success()
    second_done.require_success()
    assert world_sizes(config) == [1, 2]
    require_undisturbed(config)
