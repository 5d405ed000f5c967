"""Runs on three hosts by ssh that may come and go, and what disturbs them."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.integration.command import Cold, wait_for
from tests.integration.ssh import Cluster
from tests.patience import patient

LAUNCHER = """
import os, sys
from lanewise.launch import membership, remote
membership._SECONDS_BETWEEN_JOINS = remote._SECONDS_BETWEEN_QUESTIONS = float(os.environ["SECONDS_TO_JOIN"])
remote._SECONDS_AFTER_A_DRAIN = 4.0
from lanewise.cli.main import main
sys.exit(main())
"""
"""The command line, with seconds that do not let a test wait for minutes."""
HOST_SECONDS = patient(5.0)


def begin(
    cluster: Cluster,
    config: Path,
    *arguments: object,
    hosts: str = "[node0, node1, node2]",
    seconds_to_join: float = 1.0,
) -> Cold:
    """Start a run that goes on with two hosts, and asks the others so often whether they can join."""
    where = ("--distributed.launcher", "ssh", "--distributed.hosts", hosts)
    fewest = ("--distributed.min_nodes", 2, "--distributed.host_seconds", HOST_SECONDS)
    fewest += ("--distributed.stall_seconds", 10 * HOST_SECONDS)
    program = (sys.executable, "-c", LAUNCHER, "train", config)
    variables = {"SECONDS_TO_JOIN": str(seconds_to_join)}
    with (config.parent / "said").open("a") as said:
        line = (*where, *fewest, *arguments)
        return cluster.start(*line, program=program, variables=variables, stdout=said, stderr=said)


def said(config: Path) -> str:
    """Return what the command has written so far."""
    return (config.parent / "said").read_text()


def starts(config: Path) -> list[dict[str, Any]]:
    """Return what run.jsonl says of each start."""
    record = config.parent / "run" / "run.jsonl"
    lines = map(json.loads, record.read_text().splitlines() if record.exists() else ())
    return [line for line in lines if line["event"] == "start"]


def num_steps(config: Path) -> int:
    """Return the last step that the run has logged."""
    metrics = config.parent / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    steps = [0]
    with suppress(ValueError):  # the last line is being written
        steps += [json.loads(line)["step"] for line in lines]
    return max(steps)


def wait_for_step(config: Path, step: int) -> None:
    """Wait until a run has come so far."""
    wait_for(lambda: num_steps(config) >= step, every_seconds=0.05)


def wait_for_start(config: Path, number: int, hosts: Sequence[str]) -> None:
    """Wait until so many starts have begun, the last of them with these hosts."""
    wait_for(lambda: len(starts(config)) >= number, every_seconds=0.05)
    assert list(starts(config)[number - 1]["hosts"]) == list(hosts), said(config)


def host_process(cluster: Cluster, number: int) -> int:
    """Return the process of a host."""

    def find() -> int | None:
        lines = cluster.pids(number).items()
        return next((pid for pid, line in lines if line.startswith("lanewise: host ")), None)

    return wait_for(find)


def lose(cluster: Cluster, number: int) -> None:
    """Kill the process of a host."""
    os.kill(host_process(cluster, number), signal.SIGKILL)


def drain(cluster: Cluster, number: int) -> None:
    """Tell a host to stop."""
    os.kill(host_process(cluster, number), signal.SIGTERM)


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
