"""Three hosts by ssh that are lost, drained, cut off and come back: the model is that of a run in peace."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.command import Command, Done, lanewise, train, wait_for
from tests.integration.elastic import (
    begin,
    drain,
    host_process,
    lose,
    said,
    starts,
    wait_for_start,
    wait_for_step,
)
from tests.integration.failing import write_faulty
from tests.integration.ssh import WHY_NOT, Cluster, running_ssh

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

NUM_STEPS = ("--train.max_steps", 40)
SLOWLY = {"forward": 0.1}


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "ssh").mkdir()
    with running_ssh(tmp_path / "ssh", 3) as running:
        yield running


def write(folder: Path, **init_args: object) -> Path:
    """Write the configuration of a run that a test can disturb: it saves every 4 steps."""
    given = {"what": "none", "rank": None, "slow": SLOWLY, **init_args}
    return write_faulty(folder, **given)


def finish(cluster: Cluster, config: Path, run: Command) -> Done:
    """Wait for the end of a run, and see that nothing stays on the hosts."""
    done = run.finish()
    assert done.code == 0, said(config)
    wait_for(lambda: not cluster.pids())
    return done


def require_undisturbed(config: Path, *arguments: object) -> None:
    """Check that the model is that of a run of one process, and that the samples are those of the plan."""
    whole = config.parent / "whole"
    train(
        config, *NUM_STEPS, *arguments, "--train.run_dir", whole, "--task.init_args.slow", "{}"
    ).require_success()
    model = (config.parent / "run" / "model.safetensors").read_bytes()
    assert model == (whole / "model.safetensors").read_bytes()


def test_a_lost_host_is_left_out_and_the_model_is_the_same(cluster, tmp_path):
    """That of rank 0, which keeps the store and the lock of the folder."""
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS, "--audit", seconds_to_join=1e6) as run:
        wait_for_step(config, 6)
        lose(cluster, 0)
        wait_for_start(config, 2, ["node1", "node2"])
        finish(cluster, config, run)
    second = starts(config)[1]
    assert second["left_out"]["node0"].startswith("its process has ended")
    assert second["steps_lost"] >= 1
    lanewise("audit", tmp_path / "run").require_success()
    require_undisturbed(config)


def freeze(cluster: Cluster, number: int) -> None:
    os.kill(host_process(cluster, number), signal.SIGSTOP)


def cut(cluster: Cluster, number: int) -> None:
    cluster.hosts[number].cut()


DISTURBANCES: dict[str, Callable[[Cluster, int], None]] = {
    "lose": lose,
    "cut": cut,
    "freeze": freeze,
    "drain": drain,
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("what", DISTURBANCES)
def test_whatever_happens_to_a_host_the_model_is_the_same(cluster, tmp_path, what, number):
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS, "--audit") as run:
        wait_for_step(config, 6)
        DISTURBANCES[what](cluster, number)
        others = [f"node{other}" for other in range(3) if other != number]
        wait_for_start(config, 2, others)
        if what == "freeze":
            for pid in cluster.pids(number):
                os.kill(pid, signal.SIGCONT)
        finish(cluster, config, run)
    lanewise("audit", tmp_path / "run").require_success()
    require_undisturbed(config)
