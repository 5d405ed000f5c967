"""What joining a world changes in a process alone."""

import sys

import pytest
import torch
from torch import distributed as dist
from torch import nn

from lanewise.config import DistributedConfig
from lanewise.engine.own_loop.join import join
from lanewise.errors import TaskError, WorldError
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


def test_a_process_that_is_in_a_world_already_is_told_what_to_leave_out():
    """A second Lanes of a program, or a script that begins with init_process_group, ended in a traceback."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(WorldError, match=r"Leave init_process_group out.* call close"):
            join(Environment(world_size=2), DistributedConfig(device_type="cpu"))
    finally:
        dist.destroy_process_group()


def test_an_error_of_torch_is_shown_with_its_remedy(monkeypatch, capsys):
    """A last step left one sample for a lane: a task was told what to do, and an own loop was not."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    join(Environment(), DistributedConfig(device_type="cpu"))
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        nn.BatchNorm1d(4)(torch.randn(1, 4))
    said = shown(caught.value, capsys)
    assert "more than 1 value per channel" in said
    assert "drop_last of lanes.steps" in said
