"""The launcher ssh, on two hosts with a real sshd each: what it checks, what a run leaves, how it ends."""

import json
from pathlib import Path

import pytest

from tests.integration.command import train, wait_for, write_config
from tests.integration.ssh import WHY_NOT, running_ssh

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

HOSTS = ("--distributed.launcher", "ssh", "--distributed.hosts", "[node0, 'node1:2']")
PREEMPTED, INTERRUPTED = 75, 130


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_ssh(tmp_path_factory.mktemp("ssh")) as running:
        yield running


def run(cluster, *arguments: object, **options: object):
    """Run `lanewise` to its end, and wait for that of what it started on the hosts."""
    with cluster.start(*arguments, **options) as command:
        done = command.finish()
    wait_for(lambda: not cluster.pids())
    return done


def model_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_over_two_hosts_leaves_the_model_of_one_process(cluster, tmp_path):
    config = write_config(tmp_path)
    train(config, "--train.run_dir", tmp_path / "one").require_success()
    done = run(cluster, "train", config, *HOSTS).require_success()
    assert model_of(tmp_path / "run") == model_of(tmp_path / "one")
    assert "\nnode0 rank 0: 3 processes on cpu" in done.stderr
    assert "node1: 2 processes of" in done.stderr
    (record,) = (json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()[:1])
    assert record["hosts"] == {"node0": 1, "node1": 2}
