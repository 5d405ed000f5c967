"""What joining a world changes in a process alone."""

import sys

from lanewise.config import DistributedConfig
from lanewise.engine.own_loop.join import join
from lanewise.errors import TaskError
from lanewise.processes.world.environment import Environment


def shown(error: Exception, capsys) -> str:
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def test_a_process_alone_shows_an_error_of_ours_as_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    join(Environment(), DistributedConfig(device_type="cpu"))
    assert shown(TaskError("no model was prepared."), capsys) == "error: no model was prepared.\n"
    assert shown(RuntimeError("of the user"), capsys) == "RuntimeError: of the user\n"


def test_a_hook_of_the_user_stays(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", hook := lambda *_: None)
    join(Environment(), DistributedConfig(device_type="cpu"))
    assert sys.excepthook is hook
