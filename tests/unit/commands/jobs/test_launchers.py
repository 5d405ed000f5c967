"""What a job means on other hosts."""

import dataclasses
import shlex
import sys
from pathlib import Path

import pytest

from lanewise.commands.jobs.launchers import job_there, launcher_of, places_of, python_path_there
from lanewise.commands.jobs.train import TrainJob
from lanewise.config import DistributedConfig
from lanewise.config.launchers import SSHConfig
from lanewise.errors import ConfigError
from tests.distributed.tasks import Smooth, configure


def over_ssh(folder: Path, **ssh: object) -> TrainJob:
    """A job for two hosts, whose code lies in a folder."""
    distributed = DistributedConfig(
        launcher="ssh", hosts=("a", "b:2"), ssh=SSHConfig(**{"folder": "/there", **ssh})
    )
    config = dataclasses.replace(configure(Smooth), distributed=distributed, search_path=str(folder))
    return TrainJob(config)


def test_each_host_has_the_ranks_that_follow_those_of_the_one_before():
    hosts = DistributedConfig(launcher="ssh", hosts=("a", "b:2", "c"))
    places = [(one.rank, one.local_world_size, one.world_size) for one in places_of(hosts)]
    assert places == [(0, 1, 4), (1, 2, 4), (3, 1, 4)]
    nodes = DistributedConfig(launcher="slurm", nodes=2, devices=3)
    assert [(one.rank, one.world_size) for one in places_of(nodes)] == [(0, 6), (3, 6)]
    assert [one.world_size for one in places_of(DistributedConfig(devices=2))] == [2]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"devices": 3}, r"contradicts distributed.hosts: got 3, and 2 for b\. Remove one of them"),
        ({"reducer": "data_parallel"}, r"one process: got b:2\. Write b alone, and distributed.devices=2"),
    ],
)
def test_the_devices_of_a_host_are_said_once(keys, says):
    hosts = DistributedConfig(launcher="ssh", hosts=("a", "b:2"), **keys)
    with pytest.raises(ConfigError, match=says):
        list(places_of(hosts))


@pytest.mark.parametrize(
    ("keys", "run_dir", "says"),
    [
        ({"min_nodes": 3}, "run", "got 3, and 2 hosts. Use a smaller min_nodes, or name more hosts"),
        ({"min_nodes": 1, "reducer": "fsdp"}, "run", "one may be left. Use min_nodes=2, or reducer=ddp"),
        ({"min_nodes": 1}, "run-{number}", r"got the pattern run-\{number\}\. Name one without"),
    ],
)
def test_what_hosts_that_come_and_go_cannot_do_is_said_before_anything(tmp_path, keys, run_dir, says):
    job = over_ssh(tmp_path)
    distributed = dataclasses.replace(job.config.distributed, **keys)
    train = dataclasses.replace(job.config.train, run_dir=run_dir)
    config = dataclasses.replace(job.config, distributed=distributed, train=train)
    with pytest.raises(ConfigError, match=says):
        launcher_of(TrainJob(config))


def test_a_hostfile_is_read_again_while_the_run_goes_on(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a\nb slots=2\n")
    job = over_ssh(tmp_path)
    keys = {"hosts": (), "hostfile": str(hostfile), "min_nodes": 1}
    distributed = dataclasses.replace(job.config.distributed, **keys)
    launcher = launcher_of(TrainJob(dataclasses.replace(job.config, distributed=distributed)))
    hostfile.write_text("a\nb slots=2\nc\n")
    assert launcher.project.elastic.hosts() == [("a", 1), ("b", 2), ("c", 1)]


def test_two_devices_of_the_fewest_hosts_are_enough_for_fsdp(tmp_path):
    job = over_ssh(tmp_path)
    hosts = dataclasses.replace(job.config.distributed, hosts=("a:2", "b:2"), min_nodes=1, reducer="fsdp")
    launcher = launcher_of(TrainJob(dataclasses.replace(job.config, distributed=hosts)))
    assert launcher.project.elastic.min_hosts == 1
    assert launcher.project.limit_seconds == hosts.host_seconds


def test_paths_below_the_working_directory_are_below_that_of_the_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "code"), "/elsewhere", *sys.path])
    job = over_ssh(tmp_path / "code")
    assert job_there(job).config.search_path == "/there/code"
    path = python_path_there(job.config.distributed)
    assert path[:3] == ["/there", "/there/code", "/elsewhere"]
    assert not [entry for entry in path if "site-packages" in entry]


def test_a_dry_run_shows_the_commands_and_no_value_of_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret-here")
    job = over_ssh(tmp_path, variables={"TOKEN": None, "OTHER": "secret too"}, python="/my python")
    program = shlex.quote("exec '/my python' -P -m lanewise.launch.host")
    shown = launcher_of(job).describe()
    ssh = "ssh -T -o BatchMode=yes -o ConnectTimeout=15"
    assert shown.splitlines() == [
        f"{ssh} a {program}  # 1 process in /there, with TOKEN, OTHER",
        f"{ssh} b {program}  # 2 processes in /there, with TOKEN, OTHER",
    ]


def test_a_variable_of_this_environment_must_be_there(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(ConfigError, match="takes TOKEN from this environment, where it is not set"):
        launcher_of(over_ssh(tmp_path, variables={"TOKEN": None}))
