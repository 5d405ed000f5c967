"""Whatever fails: the first thing on every terminal is what it was and where, and soon nothing is left."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration import cases
from tests.integration.cases import Case
from tests.integration.command import train
from tests.integration.failing import Ended, on_hosts, write_faulty
from tests.integration.hosts import WHY_NOT

needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
TORCHS_OWN = ("torchelastic_", "torchinductor_")
"""What torchrun leaves after every run, and what torch caches."""


def check(case: Case, ended: Ended, launcher: str, rank: int) -> None:
    """Check that a run ended as its case says."""
    shown = "\n\n".join(f"{one.code}\n{one.text}" for one in ended.terminals)
    assert ended.seconds is not None, f"it did not end: {ended.left}\n{shown}"
    assert ended.seconds < case.allowed_seconds, shown
    # The next command removes the folders of processes that a signal ended, as torchrun's ends neighbours.
    allowed = (*TORCHS_OWN, "lanewise-") if launcher in ("c10d", "static") else TORCHS_OWN
    assert [name for name in ended.left if not name.startswith(allowed)] == []
    num_hosts = len(ended.terminals)
    for terminal in ended.terminals:
        if terminal.code == cases.KILLED:  # and could tell nothing
            continue
        first = terminal.first_error
        host = socket.gethostname() if launcher == "warm" else f"node{rank // 2}"
        for pattern in case.patterns(rank, 2 * num_hosts):
            assert re.search(pattern, first), f"no {pattern!r} in what came first:\n{first}\n\n{shown}"
        if case.phase and not case.is_of_all:
            assert re.search(rf"rank {rank}\b.* on {host}\b", first), shown
        # That of torchrun's agent, which loses its store, is a chain of two.
        assert first.count("Traceback") <= (2 if "of torchrun on the first host" in case.what else 1)
        assert terminal.code == (case.code if num_hosts == 1 else 1)


def run_case(case: Case, folder: Path, launcher: str, rank: int) -> Ended:
    if case.fault == "cgroup" and (why_not := cases.why_no_memory_group()):
        pytest.skip(why_not)
    return case.run(folder, launcher, rank)


def ids(case: Case) -> str:
    return case.what.replace(" ", "-")


ONE, FIRST, LAST = ("lanewise", 1), ("c10d", 0), ("static", 3)
"""How a run is launched, and which rank of it fails: on one machine, on the first host and on the second."""
QUICK = ("an-exception-in-forward", "SIGSTOP-in-forward", "SIGKILL-in-communication", "an-exception-in-save")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=ids(case), marks=() if ids(case) in QUICK else pytest.mark.slow)
        for case in (*cases.MATRIX, *cases.PHASES)
        if not case.disk_mib
    ],
)
def test_a_fault_on_one_machine(tmp_path, case):
    check(case, run_case(case, tmp_path, "warm", 1), "warm", 1)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "launcher", "rank"),
    [
        pytest.param(
            case,
            launcher,
            rank,
            id=f"{ids(case)}-{launcher}",
        )
        for case in cases.MATRIX
        for launcher, rank in (ONE, FIRST, LAST)
    ],
)
def test_a_fault_on_hosts(tmp_path, case, launcher, rank):
    check(case, run_case(case, tmp_path, launcher, rank), launcher, rank)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["c10d", "static"])
@pytest.mark.parametrize("case", cases.BETWEEN_HOSTS, ids=ids)
def test_a_fault_between_hosts(tmp_path, case, launcher):
    if launcher == "c10d" and "cable" in case.what:
        pytest.skip("torchrun's own agent waits for its rendezvous, after the ranks have ended")
    check(case, case.run(tmp_path, launcher, 0), launcher, 0)


@needs_hosts
@pytest.mark.slow
def test_of_a_killed_launcher_nothing_is_left(tmp_path):
    case = cases.OF_THE_LAUNCHER
    ended = case.run(tmp_path, "lanewise", 0)
    left = [name for name in ended.left if name.startswith("lanewise-")]
    check(case, replace(ended, left=[name for name in ended.left if name not in left]), "lanewise", 0)
    assert len(left) <= 1  # the folder that the next run removes


def test_a_slow_run_is_no_stall(tmp_path):
    """Each of these takes longer than the limit, in pieces that do not."""
    slow = {"start": 2.5, "data": 0.4, "evaluation": 0.4, "save": 1.0}
    config = write_faulty(tmp_path, num_workers=1, rank=None, slow=slow)
    limits = ("--distributed.stall_seconds", 2, "--distributed.start_seconds", 20)
    train(config, "--distributed.devices", 2, "--train.max_steps", 2, *limits).require_success()


def steps(folder) -> list[int]:
    """Return the steps of which there is a line, without those of evaluations."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "train/loss" in line]


AFTER_A_RESTART = {"step": 10, "once": True}


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGKILL", "exception"])
@pytest.mark.parametrize(("launcher", "rank"), [("torchrun", 1), ("c10d", 0), ("c10d", 3)])
def test_processes_that_torchrun_starts_again_go_on(tmp_path, launcher, rank, fault):
    config = write_faulty(tmp_path, rank=rank, what=fault, **AFTER_A_RESTART)
    ended = on_hosts(config, launcher, max_restarts=2)
    shown = "\n\n".join(one.text for one in ended.terminals)
    assert len(ended.faults) == 1
    assert [one.code for one in ended.terminals] == [0] * len(ended.terminals), shown
    assert steps(tmp_path) == list(range(1, 21))
    train(config, "--train.run_dir", tmp_path / "whole", "--task.init_args.rank", "null").require_success()
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "num_faults"), [("exception", 2), ("sys.exit", 1)])
@pytest.mark.parametrize(("launcher", "rank"), [("torchrun", 1), ("c10d", 3)])
def test_what_a_restart_would_repeat_ends_the_run(tmp_path, launcher, rank, fault, num_faults):
    config = write_faulty(tmp_path, rank=rank, what=fault, step=10)
    ended = on_hosts(config, launcher, max_restarts=5)
    shown = "\n\n".join(one.text for one in ended.terminals)
    assert len(ended.faults) == num_faults, shown
    assert ended.seconds is not None
    assert all(one.code for one in ended.terminals), shown
