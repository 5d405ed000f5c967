"""A job that runs in this process."""

import dataclasses
import threading
from typing import Any

import pytest

from lanewise.commands.jobs import start as module
from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.start import start
from lanewise.config import DistributedConfig
from lanewise.errors import TaskError
from tests.distributed.tasks import Smooth, configure


class Failing(Job):
    """Fails, or does not."""

    def run(self, world: Any) -> str:
        """See `Job`."""
        if self.config.train.seed:
            raise TaskError("it went wrong.")
        return "done"


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_a_process_is_watched_no_longer_than_its_job_runs(monkeypatch):
    """A watch that stayed would end the process five minutes later, whatever it did then.

    A run of one process keeps the command line by which its user finds it.
    """
    for name in ("set_malloc", "set_determinism"):
        monkeypatch.setattr(
            f"lanewise.processes.device.{'allocator' if 'malloc' in name else 'determinism'}.{name}",
            lambda *_, **__: None,
        )
    monkeypatch.setattr(
        "lanewise.runs.loggers.RankLog", lambda *_: type("Log", (), {"share_warnings": lambda *_: None})()
    )
    monkeypatch.setattr(module, "pin_environment", lambda *_: None)
    monkeypatch.setattr("lanewise.commands.jobs.rank.name_process", pytest.fail)
    config = dataclasses.replace(configure(Smooth), distributed=DistributedConfig(device_type="cpu"))
    assert start(Failing(config), is_fresh=False) == "done"
    assert watches() == []
    failing = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    with pytest.raises(TaskError, match="it went wrong"):
        start(Failing(failing), is_fresh=False)
    assert watches() == []
