"""The launcher ssh, on two hosts with a real sshd each: what it checks, what a run leaves, how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.command import Done, train, wait_for, write_config
from tests.integration.failing import (
    OVER_SSH,
    SECONDS_TO_END,
    STALL_SECONDS,
    over_ssh,
    wait_for_steps,
    write_faulty,
)
from tests.integration.hosts import Host
from tests.integration.ssh import CLIENT, NAMES, WHY_NOT, Cluster, running_ssh

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

SSH = ("--distributed.launcher", "ssh")
UNEQUAL = (*SSH, "--distributed.hosts", "[node0, 'node1:2']")
PREEMPTED = 75


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_ssh(tmp_path_factory.mktemp("ssh")) as running:
        yield running


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(write_config(folder)).require_success()
    return (folder / "run" / "model.safetensors").read_bytes()


def run(cluster: Cluster, *arguments: object, **options: object) -> Done:
    """Run `lanewise` to its end, and see that nothing stays on the hosts."""
    with cluster.start(*arguments, **options) as command:
        done = command.finish()
    wait_for(lambda: not cluster.pids())
    return done


def test_what_one_terminal_starts_on_two_hosts_leaves_the_model_of_one_process(
    cluster, tmp_path, on_one_process
):
    config = write_config(tmp_path)
    done = run(cluster, "train", config, *UNEQUAL).require_success()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process
    said = done.stderr.splitlines()
    assert said[0].startswith(f"node0: 1 process of {sys.executable} in {Path.cwd()}, at 10.77.0.1 (")
    assert said[1].startswith(f"node1: 2 processes of {sys.executable} in {Path.cwd()}, at 10.77.0.2 (")
    assert any(line.startswith("node0 rank 0: 3 processes on cpu") for line in said)
    start = json.loads((tmp_path / "run" / "run.jsonl").read_text().splitlines()[0])
    assert start["hosts"] == {"node0": 1, "node1": 2}


@pytest.mark.slow
def test_it_goes_on_and_evaluates_with_a_hostfile_on_other_hosts(cluster, tmp_path, on_one_process):
    config = write_config(tmp_path)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1  # the first one\nnode0:1\n")
    over = (*SSH, "--distributed.hostfile", hostfile)
    run(cluster, "train", config, *UNEQUAL, "--train.max_steps", 3).require_success()
    done = run(cluster, "train", config, *over, "--resume").require_success()
    assert any(line.startswith("node1 rank 0: 2 processes on cpu") for line in done.stderr.splitlines())
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.slow
def test_an_evaluation_runs_on_the_hosts_and_shows_its_values_here(cluster, tmp_path):
    config = write_faulty(tmp_path, what="none", rank=None)
    trained = run(cluster, "train", config, *OVER_SSH).require_success()
    evaluate = ("evaluate", tmp_path / "run", "--search_path", Path(__file__).parent)
    over_two = run(cluster, *evaluate, *OVER_SSH).require_success()
    alone = run(cluster, *evaluate).require_success()
    assert over_two.stdout == alone.stdout
    assert re.fullmatch(
        r"\S+/model.safetensors on samples: [\d,]+ of all\nall/loss  \d\.\d+\n", alone.stdout
    ), trained.stderr


SCRIPT = """
import lanewise, tasks
class Mine(tasks.Line):
    def eval_datasets(self):
        return {"all": self.train_dataset()}
if __name__ == "__main__":
    task = Mine()
    distributed = {"launcher": "ssh", "hosts": ["node0", "node1:2"], "equality": "exact"}
    result = lanewise.train(
        task,
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        train={"epochs": 2, "run_dir": "run"},
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        distributed=distributed,
    )
    print(sorted(result.evaluation), len(lanewise.predict(result.run_dir, "all", task=task)))
"""


@pytest.mark.slow
def test_a_task_of_a_script_is_sent_to_the_hosts(cluster, tmp_path, on_one_process):
    (tmp_path / "script.py").write_text(SCRIPT)
    shutil.copy(Path(__file__).parent / "tasks.py", tmp_path)
    with cluster.start(program=(sys.executable, "script.py"), cwd=tmp_path) as command:
        done = command.finish().require_success()
    assert done.stdout == "['all/loss'] 22\n"
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_wish_to_stop_saves_and_another_start_leaves_the_same_model(cluster, tmp_path, sign):
    config = write_faulty(tmp_path, what="none", rank=None, slow={"forward": 0.1})
    with cluster.start("train", config, *OVER_SSH) as command:
        wait_for_steps(config)
        os.kill(command.pid, sign)
        done = command.finish()
    assert done.code == PREEMPTED, done.stderr
    assert "and a checkpoint was saved" in done.stderr
    run(cluster, "train", config, *OVER_SSH, "--resume").require_success()
    whole = tmp_path / "whole"
    train(config, "--train.run_dir", whole).require_success()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


# ---------------------------------------------------------------------------------- what is checked first


@contextmanager
def known_as(cluster: Cluster, name: str, address: str, key: str = "key") -> Iterator[None]:
    """Let ssh know a host by one more name, which may have another address or key than it should."""
    file = cluster.folder / "ssh_config"
    before = file.read_text()
    entry = CLIENT.format(name=name, address=address, folder=cluster.folder)
    file.write_text(before + entry.replace("/key\n", f"/{key}\n"))
    yield
    file.write_text(before)


def refused(cluster: Cluster, folder: Path, *arguments: object, **options: object) -> list[str]:
    """Return the errors of a run that must not have begun."""
    done = run(cluster, "train", write_config(folder), *SSH, *arguments, **options)
    assert done.code == 2, done.stderr
    assert not (folder / "run" / "run.jsonl").exists()
    return done.errors


@pytest.mark.slow
def test_an_unreachable_host_is_named(cluster, tmp_path):
    with known_as(cluster, "away", "10.77.0.9"):
        (error,) = refused(cluster, tmp_path, "--distributed.hosts", "[node0, away]")
    assert error.startswith("error: host away: ssh ended with exit code 255: ")
    assert "`ssh away true` must succeed without a question" in error


@pytest.mark.slow
def test_a_host_that_does_not_take_the_key_is_named(cluster, tmp_path):
    command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", cluster.folder / "other")
    subprocess.run(command, check=True)
    with known_as(cluster, "strict", "10.77.0.2", key="other"):
        (error,) = refused(cluster, tmp_path, "--distributed.hosts", "[node0, strict]")
    assert error.startswith("error: host strict: ssh ended with exit code 255: root@10.77.0.2: Permission")


@pytest.mark.slow
def test_another_version_of_torch_is_named(cluster, tmp_path):
    folder = tmp_path / "other" / "torch-0.0.1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n[ $(hostname) = node1 ] && export PYTHONPATH={folder.parent}\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (error,) = refused(cluster, tmp_path, *UNEQUAL[2:], "--distributed.ssh.python", python)
    assert error.startswith(
        f"error: host node1: {sys.executable} there has torch 0.0.1, and this machine has"
    )


@pytest.mark.slow
def test_other_user_code_is_named(cluster, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        shutil.copy(Path(__file__).parent / "tasks.py", folder)
    config = write_config(here, search_path=".")
    there_too = ("--distributed.ssh.folder", there)
    run(cluster, "train", config.name, *UNEQUAL, *there_too, cwd=here).require_success()
    with (there / "tasks.py").open("a") as module:
        module.write("# changed\n")
    done = run(cluster, "train", config.name, *UNEQUAL, *there_too, cwd=here)
    assert done.code == 2
    what = f"the code in {there} there is not that of this machine: tasks.py differs. Copy it there."
    assert done.errors == [f"error: host {name}: {what}" for name in NAMES[:2]]


@pytest.mark.slow
def test_a_run_dir_that_is_not_shared_is_named(cluster, tmp_path):
    private = ("--train.run_dir", "/dev/shm/run")
    (error,) = refused(cluster, tmp_path, *UNEQUAL[2:], *private)
    assert error.startswith("error: host node1: run_dir /dev/shm/run there is not that of node0.")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("nft", path="/usr/sbin") is None, reason="not installed: nft (Debian: nftables)"
)
def test_a_closed_port_is_named(cluster, tmp_path):
    with closed_ports(cluster.hosts[1]):
        (error,) = refused(cluster, tmp_path, *UNEQUAL[2:], "--distributed.start_seconds", 4)
    assert error.startswith(
        "error: host node1: node0 can't connect to a port of it: tried 10.77.0.2 (timed out)"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("nft", path="/usr/sbin") is None, reason="not installed: nft (Debian: nftables)"
)
def test_a_host_that_does_not_answer_at_first_is_tried_again(cluster, tmp_path):
    said = tmp_path / "said"
    with ExitStack() as closed, said.open("w") as stderr:
        closed.enter_context(closed_ports(cluster.hosts[1]))
        with cluster.start("train", write_config(tmp_path), *UNEQUAL, stderr=stderr) as command:
            wait_for(lambda: "waiting for host node1: node0 can't connect" in said.read_text())
            closed.close()
            command.finish().require_success()


@contextmanager
def closed_ports(host: Host) -> Iterator[None]:
    """Let nobody begin a connection to a host, but for ssh."""
    rule = "tcp dport 1024-65535 tcp flags syn / syn,ack drop"
    chain = "{ type filter hook input priority 0; }"
    table = f"add table inet closed; add chain inet closed in {chain}; add rule inet closed in {rule}"
    subprocess.run(host.enter("/usr/sbin/nft", table), check=True)
    yield
    subprocess.run(host.enter("/usr/sbin/nft", "delete table inet closed"), check=True)


# --------------------------------------------------------------------------------------------- when it fails

EXCEPTION = "ValueError: the image is upside down"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "says", "seconds"),
    [
        *(
            pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.slow)
            for case in (
                ("exception", 3, EXCEPTION, SECONDS_TO_END),
                ("exception", 0, EXCEPTION, SECONDS_TO_END),
                ("SIGKILL", 0, "was killed by signal 9", SECONDS_TO_END),
                ("SIGKILL", 3, "was killed by signal 9", SECONDS_TO_END),
                ("SIGSTOP", 0, "which is stopped (SIGSTOP)", STALL_SECONDS + SECONDS_TO_END),
                ("SIGSTOP", 3, "which is stopped (SIGSTOP)", STALL_SECONDS + SECONDS_TO_END),
            )
        ),
    ],
)
def test_a_fault_of_a_worker_is_the_first_thing_shown_and_leaves_nothing(
    cluster, tmp_path, fault, rank, says, seconds
):
    ended = over_ssh(cluster, write_faulty(tmp_path, what=fault, rank=rank))
    (terminal,) = ended.terminals
    assert ended.seconds is not None, f"{ended.left}\n{terminal.text}"
    assert ended.seconds < seconds, terminal.text
    assert terminal.code == 1
    assert re.search(rf"^error: .*(\n.*)*rank {rank}\b", terminal.first_error), terminal.text
    assert says in terminal.first_error
    assert f"on {NAMES[rank // 2]}" in terminal.first_error
    assert terminal.text.count("Traceback") <= 1
    assert [name for name in ended.left if not name.startswith("torchinductor_")] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_end_of_the_process_on_a_host_is_told_with_its_name(cluster, tmp_path, number):
    def kill(*_: object) -> None:
        (pid,) = (pid for pid, line in cluster.pids().items() if line.startswith(f"lanewise: host {number},"))
        os.kill(pid, signal.SIGKILL)

    ended = over_ssh(cluster, write_faulty(tmp_path, what="none", rank=None, slow={"forward": 0.1}), act=kill)
    (terminal,) = ended.terminals
    assert ended.seconds is not None, f"{ended.left}\n{terminal.text}"
    assert ended.seconds < SECONDS_TO_END
    assert terminal.first_error.startswith(f"error: host {NAMES[number]}: its process has ended"), (
        terminal.text
    )


def reset_ranks(hosts: Sequence[Host], _: object) -> None:
    """Reset what the ranks of the second host are connected to; its agent keeps its connection."""
    shown = hosts[1].enter("ss", "--tcp", "--numeric", "--processes", "--no-header", "state", "established")
    lines = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.splitlines()
    for port in [line.split()[2].rpartition(":")[2] for line in lines if "lanewise: rank" in line]:
        kill = hosts[1].enter("ss", "--kill", "--tcp", "sport", "=", f":{port}")
        subprocess.run(kill, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_connections_that_are_reset_are_named_as_such(cluster, tmp_path):
    config = write_faulty(tmp_path, what="none", rank=None, slow={"forward": 0.1})
    ended = over_ssh(cluster, config, act=reset_ranks)
    (terminal,) = ended.terminals
    assert ended.seconds is not None, f"{ended.left}\n{terminal.text}"
    assert re.search(r"connection was reset|[Cc]onnection (reset|closed|abort)", terminal.first_error), (
        terminal.text
    )
    assert "its log may say why" not in terminal.text


@pytest.mark.slow
def test_a_run_dir_that_is_removed_ends_the_run(cluster, tmp_path):
    config = write_faulty(tmp_path, what="none", rank=None, slow={"forward": 0.1})
    ended = over_ssh(cluster, config, act=lambda *_: shutil.rmtree(tmp_path / "run"))
    (terminal,) = ended.terminals
    assert terminal.code == 1
    assert "jsonl cannot be written: it was moved or removed during the run." in terminal.first_error


@pytest.mark.slow
def test_a_fork_server_that_is_stopped_does_not_keep_the_hosts(cluster, tmp_path):
    """The ranks end, and nobody would learn of it."""

    def stop(*_: object) -> None:
        server = min(pid for pid, line in cluster.pids().items() if "-P -m lanewise.launch " in line)
        os.kill(server, signal.SIGSTOP)

    config = write_faulty(tmp_path, what="none", rank=None, slow={"forward": 0.1})
    ended = over_ssh(cluster, config, act=stop)
    (terminal,) = ended.terminals
    assert ended.seconds is not None, f"{ended.left}\n{terminal.text}"
    assert terminal.code == 1
    assert re.search(
        r"^error: the process that workers .*which is stopped \(SIGSTOP\).*\n.*on node[01]",
        terminal.first_error,
    ), terminal.text


@pytest.mark.slow
def test_nothing_survives_a_launcher_that_is_killed(cluster, tmp_path):
    config = write_faulty(tmp_path, what="none", rank=None, slow={"forward": 0.1})
    ended = over_ssh(cluster, config, act=lambda _, commands: os.kill(commands[0].pid, signal.SIGKILL))
    assert ended.seconds is not None, ended.left
    assert ended.seconds < SECONDS_TO_END


@pytest.mark.slow
def test_a_start_after_a_failure_goes_on(cluster, tmp_path):
    config = write_faulty(tmp_path, what="exception", rank=3, step=6, once=True)
    done = run(cluster, "train", config, *OVER_SSH, "--distributed.max_restarts", 1).require_success()
    assert "starting again, 1 of 1 times: ValueError" in done.stderr
    assert "node0 rank 0: 4 processes on cpu" in done.stderr


@pytest.mark.slow
def test_a_cut_cable_ends_both_hosts(tmp_path):
    """It needs hosts of its own, as nobody puts the cable back."""
    (tmp_path / "ssh").mkdir()
    config = write_faulty(tmp_path, what="none", rank=None, slow={"forward": 0.1})
    with running_ssh(tmp_path / "ssh") as cluster:
        ended = over_ssh(cluster, config, act=lambda hosts, _: hosts[1].cut())
    (terminal,) = ended.terminals
    assert ended.seconds is not None, f"{ended.left}\n{terminal.text}"
    assert ended.seconds < STALL_SECONDS + SECONDS_TO_END
    assert re.search("node1", terminal.first_error), terminal.text
