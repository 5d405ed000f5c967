"""Three hosts by ssh that are lost, drained, cut off and come back: the model is that of a run in peace."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.command import Command, Done, lanewise, train, wait_for
from tests.integration.elastic import (
    DISTURBANCES,
    begin,
    drain,
    lose,
    said,
    starts,
    wait_for_start,
    wait_for_step,
)
from tests.integration.failing import write_faulty
from tests.integration.ssh import NAMES, WHY_NOT, Cluster, running_ssh
from tests.integration.test_streams import write_streaming
from tests.patience import patient
from tests.soak.kill_and_resume import write_noisy

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

NUM_STEPS = ("--train.max_steps", 40)
SLOWLY = {"forward": patient(0.1)}
"""So that a run does not end before a host has joined, however slow the machine is."""


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
    """Check that the model is that of a run of one process."""
    whole = config.parent / "whole"
    train(
        config, *NUM_STEPS, *arguments, "--train.run_dir", whole, "--task.init_args.slow", "{}"
    ).require_success()
    model = (config.parent / "run" / "model.safetensors").read_bytes()
    assert model == (whole / "model.safetensors").read_bytes()


def test_a_lost_host_is_left_out_and_the_model_is_the_same(cluster, tmp_path):
    """That of rank 0, which keeps the store and the lock of the folder."""
    config = write(tmp_path, slow={"forward": 0.1})
    with begin(cluster, config, *NUM_STEPS, "--audit", seconds_to_join=1e6) as run:
        wait_for_step(config, 6)
        lose(cluster, 0)
        wait_for_start(config, 2, ["node1", "node2"])
        finish(cluster, config, run)
    second = starts(config)[1]
    assert second["left_out"]["node0"].startswith("its process has ended")
    assert isinstance(second["steps_lost"], int)
    lanewise("audit", tmp_path / "run").require_success()
    require_undisturbed(config)


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


# ---------------------------------------------------------------------------------- whatever the run is


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "shard_optimizer", "fp16", "stream", "close"])
def test_whatever_the_run_is_the_model_is_the_same(cluster, tmp_path, kind):
    """The host of rank 0 is lost and comes back; then another one is drained."""
    options = {
        "fsdp": ("--distributed.reducer", "fsdp"),
        "shard_optimizer": ("--distributed.shard_optimizer", "true"),
        "fp16": ("--precision", "fp16"),
        "stream": (),
        "close": ("--distributed.equality", "close"),
    }[kind]
    slowly: tuple[object, ...] = ("--task.init_args.sleep_seconds", patient(0.1))
    if kind == "stream":
        config = write_streaming(tmp_path, "Lanes", train={"max_steps": 60, "run_dir": str(tmp_path / "run")})
    else:
        config = write_noisy(tmp_path, num_steps=60)
    with begin(cluster, config, *options, *slowly) as run:
        wait_for_step(config, 4)
        lose(cluster, 0)
        wait_for_start(config, 3, list(NAMES))
        wait_for_step(config, starts(config)[-1]["first_step"])
        drain(cluster, 2)
        wait_for_start(config, 4, NAMES[:2])
        finish(cluster, config, run)
    two = ("--distributed.devices", 2, "--train.run_dir", tmp_path / "whole")
    train(config, *options, *two).require_success()
    files = [tmp_path / name / "model.safetensors" for name in ("run", "whole")]
    if kind != "close":
        assert files[0].read_bytes() == files[1].read_bytes()
        return
    ours, theirs = map(load_file, files)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_host_that_is_added_to_the_hostfile_joins(cluster, tmp_path):
    config, hostfile = write(tmp_path, slow={"forward": patient(0.4)}), tmp_path / "hosts"
    hostfile.write_text("node1\nnode2 slots=2\n")
    file = ("--distributed.hosts", "[]", "--distributed.hostfile", hostfile)
    with begin(cluster, config, *NUM_STEPS, *file) as run:
        wait_for_step(config, 6)
        hostfile.write_text("node0\nnode1\nnode2 slots=2\n")
        wait_for_start(config, 2, NAMES)
        finish(cluster, config, run)
    assert [start["world_size"] for start in starts(config)] == [3, 4]
    assert starts(config)[1]["steps_lost"] == 0
    require_undisturbed(config)


# ------------------------------------------------------------------------------------ who does not take part


def on_host(cluster: Cluster, number: int, *command: object) -> None:
    """Run a command in the file system of a host."""
    (pid,) = (
        Path(f"/proc/{cluster.daemons[number].pid}/task/{cluster.daemons[number].pid}/children")
        .read_text()
        .split()
    )
    subprocess.run(["nsenter", f"--mount=/proc/{pid}/ns/mnt", *map(str, command)], check=True)


@pytest.mark.slow
def test_a_host_that_has_lost_its_mount_is_left_out(cluster, tmp_path):
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS, seconds_to_join=1e6) as run:
        wait_for_step(config, 6)
        on_host(cluster, 0, "mount", "-t", "tmpfs", "none", tmp_path / "run")
        lose(cluster, 1)
        wait_for_start(config, 2, ["node1", "node2"])
        finish(cluster, config, run)
    left_out = starts(config)[1]["left_out"]
    assert left_out == {
        "node0": f"run_dir {tmp_path}/run there does not have this run. Mount its file system there"
    }
    require_undisturbed(config)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["code", "pin"])
def test_a_host_with_other_code_or_another_cpu_is_left_out(cluster, tmp_path, what):
    config = write(tmp_path)
    options: tuple[object, ...] = ()
    if what == "code":
        for name in ("code", "other"):
            shutil.copytree(Path(__file__).parent, tmp_path / name)
        (tmp_path / "other" / "faults.py").write_text("# another one\n")
        on_host(cluster, 0, "mount", "--bind", tmp_path / "other", tmp_path / "code")
        options = ("--search_path", tmp_path / "code")
    else:
        python = tmp_path / "python"
        other = "[ $(hostname) = node2 ] && export ATEN_CPU_CAPABILITY=default"
        python.write_text(f'#!/bin/sh\n{other}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        options = ("--distributed.ssh.python", python)
    with begin(cluster, config, *NUM_STEPS, *options) as run:
        finish(cluster, config, run)
    (start,) = starts(config)
    name, says = ("node0", "faults.py differs") if what == "code" else ("node2", "it has cpu_capability=")
    assert list(start["left_out"]) == [name]
    assert says in start["left_out"][name]
    require_undisturbed(config)


@pytest.mark.slow
def test_a_host_that_ends_each_first_step_is_left_out_for_good(cluster, tmp_path):
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS) as run:
        for number in range(2):
            wait_for(lambda number=number: len(starts(config)) == 2 * number + 1, every_seconds=0.05)
            lose(cluster, 2)
        finish(cluster, config, run)
    assert "node2: it ended two starts running" in said(config)
    require_undisturbed(config)


@pytest.mark.slow
def test_an_error_of_the_user_leaves_out_one_host_at_most_and_ends_the_run(cluster, tmp_path):
    config = write_faulty(tmp_path, what="exception", rank=1, step=6)
    with begin(cluster, config, *NUM_STEPS, seconds_to_join=1e6) as run:
        assert run.finish().code == 1
    assert said(config).count("error: ") == 1
    assert [list(start["hosts"]) for start in starts(config)] == [[*NAMES], [*NAMES], ["node0", "node2"]]
    wait_for(lambda: not cluster.pids())


@pytest.mark.slow
def test_hosts_with_several_devices_give_their_lanes_to_those_that_are_left(cluster, tmp_path):
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS, hosts="['node0:2', node1, node2]", seconds_to_join=1e6) as run:
        wait_for_step(config, 6)
        lose(cluster, 0)
        finish(cluster, config, run)
    assert [start["world_size"] for start in starts(config)] == [4, 2]
    require_undisturbed(config)


@pytest.mark.slow
def test_while_it_waits_for_hosts_a_run_can_be_reported_and_ended(cluster, tmp_path):
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS) as run:
        wait_for_step(config, 6)
        for number in (1, 2):
            cluster.crash(number)
        wait_for(lambda: "waiting for host node1" in said(config))
        lanewise("report", tmp_path / "run").require_success()
        os.kill(run.pid, signal.SIGINT)
        assert run.finish().code == 130
    wait_for(lambda: not cluster.pids(0))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["it connects", "it goes on without a host"])
def test_control_c_between_two_starts_leaves_nothing_on_any_host(cluster, tmp_path, moment):
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS, seconds_to_join=1e6) as run:
        if moment == "it connects":
            wait_for(cluster.pids, every_seconds=0.05)
        else:
            wait_for_step(config, 6)
            lose(cluster, 1)
            wait_for(lambda: "starting again" in said(config), every_seconds=0.05)
        os.kill(run.pid, signal.SIGINT)
        assert run.finish().code == 130
    assert "Traceback" not in said(config)
    wait_for(lambda: not cluster.pids())


@pytest.mark.slow
def test_hosts_that_are_lost_faster_than_the_run_saves_end_it(cluster, tmp_path):
    """No start gets further than the one before: three are free, and another loss is the end."""
    config = write(tmp_path)
    seldom = ("--checkpoint.every.steps", 1000, "--distributed.max_restarts", 0)
    with begin(cluster, config, *NUM_STEPS, *seldom, seconds_to_join=1e6) as run:
        for number, host in enumerate([0, 1, 2, 0], 1):
            wait_for(lambda number=number: said(config).count("start with ") == number)
            lose(cluster, host)
        assert run.finish().code == 1
    assert said(config).count("error: host node0: its process has ended") == 1
    assert "4 starts failed, or saved nothing before a host was lost" in said(config)
    wait_for(lambda: not cluster.pids())


@pytest.mark.slow
def test_a_host_whose_connections_end_while_it_drains_saves_all_the_same(cluster, tmp_path):
    """A shutdown ends sshd first."""
    config = write(tmp_path)
    with begin(cluster, config, *NUM_STEPS, seconds_to_join=1e6) as run:
        wait_for_step(config, 6)
        drain(cluster, 0)
        cluster.hang_up(0)
        wait_for_start(config, 2, ["node1", "node2"])
        finish(cluster, config, run)
    second = starts(config)[1]
    assert second["left_out"] == {"node0": "it was told to stop"}
    assert second["steps_lost"] == 0
    require_undisturbed(config)
