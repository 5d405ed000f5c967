"""Hosts that a command reaches: which command that is, and what goes through it."""

import sys
from inspect import signature

import pytest

from lanewise.launch.command import slurm_launcher, ssh_launcher
from lanewise.launch.wire import CommandWire, _lines
from tests.unit.launch.scripted import PROJECT

# The threads of a launcher read the pipes of a wire as long as the process lives, so nothing closes them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HOSTS = [("gpu1", 2), ("me@gpu2", 1)]


def test_ssh_starts_the_interpreter_of_each_host():
    first, second = ssh_launcher(HOSTS, "/opt/my env/python", PROJECT).describe().splitlines()
    assert first.startswith("ssh -T -o BatchMode=yes ")
    assert first.partition("gpu1 ")[2] == (
        """'exec '"'"'/opt/my env/python'"'"' -P -m lanewise.launch.host'  # 2 processes in /home/me"""
    )
    assert " me@gpu2 " in second
    assert second.endswith("# 1 process in /home/me")


def test_srun_starts_a_step_on_each_node():
    launcher = slurm_launcher(HOSTS, PROJECT, num_starts=3)
    assert launcher.num_starts == 3
    assert f"--nodelist=gpu1 {sys.executable} -P -m lanewise.launch.host  # 2 " in launcher.describe()


def test_a_wire_that_is_given_no_command_starts_the_process_here():
    """As that of a Ray actor, which is on the node."""
    default = signature(CommandWire).bind("It must start.")
    default.apply_defaults()
    assert " ".join(default.arguments["command"]) == f"{sys.executable} -P -m lanewise.launch.host"


def test_the_remedy_names_the_host():
    launcher = ssh_launcher([("gpu1", 2)], "python", PROJECT)
    launcher.command_of = lambda name: ("true", name)
    ((name, number, wire),) = launcher.connect()
    assert (name, number) == ("gpu1", 2)
    assert wire.remedy == "`ssh gpu1 true` must succeed without a question, and python have lanewise there."
    wire.close()
    assert wire.why_ended() == "true ended with exit code 0"


def test_a_wire_carries_lines_both_ways_until_the_command_ends():
    wire = CommandWire("It must start.", ("sh", "-c", "echo early >&2; cat; printf 'no end'; exit 3"))
    wire.send(b"one\n")
    lines = _lines(wire.read)
    assert next(lines) == b"one"
    long = b"x" * 50_000
    wire.send(long + b"\n")
    assert next(lines) == long
    wire.close()
    assert list(lines) == [b"no end"]
    assert list(_lines(wire.read_error)) == [b"early"]
    assert wire.why_ended() == "sh ended with exit code 3"
