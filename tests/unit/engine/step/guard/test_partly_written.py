"""A float buffer of which lanes write a part each is named; a running statistic is not."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lanewise.engine.buffers.pack import find_places
from lanewise.engine.step.guard.partly_written import PartlyWritten
from lanewise.engine.step.message import StepTotals
from lanewise.lanes import LaneTurn
from lanewise.processes.world.world import LocalWorld
from lanewise.reduce.single import SingleReducer


def partly(model, lane):
    model.queue[lane] = 1.0


def whole(model, lane):
    model.queue.add_(lane + 1)


def equally(model, lane):
    model.queue[0] = 1.0


def normalise(model, lane):
    model.norm(torch.full((2, 2), float(lane)))
    model.norm.running_mean[0] = 0.0


@pytest.mark.parametrize(
    ("write", "step_state", "is_named"),
    [
        (partly, (), True),
        (partly, ("queue",), False),
        (whole, (), False),
        (equally, (), False),
        (normalise, (), False),
    ],
)
def test_it_is_named_where_lanes_write_other_parts_of_it(caplog, write, step_state, is_named):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model.norm = nn.BatchNorm1d(2)
    model.register_buffer("queue", torch.zeros(4))
    model.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
    places = [find_places(model, step_state)]
    look = PartlyWritten(SingleReducer(model, 2, "exact"), LocalWorld(torch.device("cpu")), places)
    caplog.set_level(logging.WARNING)
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    turn = LaneTurn(0, 0, 0, range(1), range(2), is_last=False)
    look.begin(turn)
    for lane in range(2):
        for name, buffer in model.named_buffers():
            buffer.copy_(start[name])
        write(model, lane)
        look.after_forward(turn._replace(lane=lane), None)
    assert look.finish(StepTotals([]))
    assert ("different elements of the buffer queue" in caplog.text) == is_named


def test_a_rank_without_samples_has_seen_nothing_of_the_buffer(caplog):
    """A first step with fewer samples than lanes ended in a KeyError."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model.register_buffer("queue", torch.zeros(4))
    world = SimpleNamespace(rank=0, all_gather_tree=lambda own: [own, ([], {})])
    look = PartlyWritten(SingleReducer(model, 2, "exact"), world, [])
    turn = LaneTurn(0, 0, 0, range(1), range(2), is_last=False)
    look.begin(turn)
    for lane in range(2):
        model.queue.zero_()
        partly(model, lane)
        look.after_forward(turn._replace(lane=lane), None)
    assert look.finish(StepTotals([]))
    assert "different elements of the buffer queue" in caplog.text
