"""A float buffer of which lanes write a part each is named; a running statistic is not."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.buffers.pack import find_places, pack_buffers
from lanewise.engine.buffers.partly_written import name_partly_written
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.world.world import LocalWorld

ALONE = LocalWorld(torch.device("cpu"))


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
    buffers = LaneBuffers([[model]], ALONE, Placement.of(2, ALONE), places)
    caplog.set_level(logging.WARNING)
    for lane in range(2):
        buffers.begin()
        write(model, lane)
        buffers.end(LaneTurn(0, 0, lane, range(1), range(2), is_last=lane == 1), 1)
    buffers.merge(buffers.changes)
    assert ("different elements of the buffer queue" in caplog.text) == is_named


def test_a_rank_without_samples_has_seen_nothing_of_the_buffer(caplog):
    """A first step with fewer samples than lanes ended in a KeyError."""
    model = nn.Module()
    model.register_buffer("queue", torch.zeros(4))
    world = SimpleNamespace(rank=0, all_gather_tree=lambda own: [own, ([], {})])
    (pack,) = pack_buffers([model])
    name_partly_written([pack], [{0: values} for values in torch.eye(4)[:2]], world)
    assert "different elements of the buffer queue" in caplog.text
