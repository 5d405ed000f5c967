"""Buffers that lanes of several processes change, some of which share a group."""

from typing import Any

import pytest
import torch
from torch import nn

from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.lanes import Placement, Schedule, lane_ranges
from lanewise.testing import run_distributed
from tests.slow import slow

NUM_LANES, NUM_STEPS = 5, 4
NUM_SAMPLES = 7
"""Of a step; four lanes have some."""


class Statistics(nn.Module):
    """Has float buffers and integers of equal dtypes, one of which begins to grow in some step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2]))
        self.register_buffer("wide", torch.arange(1, 50, dtype=torch.float64) / 7)
        self.register_buffer("mask", torch.tensor([0.3, -torch.inf]))
        self.register_buffer("seen", torch.tensor([0.5]))
        self.register_buffer("count", torch.tensor(2**60))
        self.register_buffer("table", torch.tensor([7, 8]))

    def forward(self, step: int, lane: int, grows_from: int) -> None:
        self.mean += 0.1 * lane
        self.wide *= 0.7
        self.count += 1
        if step >= grows_from:
            self.seen = torch.full((step + 1,), 0.7 * lane)


def merge(
    world, grows_from: int, num_samples: int = NUM_SAMPLES, micro_batch_size: int = 2
) -> dict[str, Any]:
    """Take some steps, and return the buffers."""
    module = Statistics()
    buffers = LaneBuffers([[module]], world, Placement.of(NUM_LANES, world))
    lanes = lane_ranges(NUM_LANES, world.world_size)[world.rank]
    for turn in Schedule(num_samples, micro_batch_size * NUM_LANES, micro_batch_size).turns(
        lanes, 0, NUM_STEPS
    ):
        buffers.begin()
        if turn.positions:
            module(turn.step, turn.lane, grows_from)
        buffers.end(turn, len(turn.positions))
        if turn.is_last:
            told = world.all_gather_tree(buffers.changes)
            buffers.merge(list(map(max, *told)) if len(told) > 1 else told[0])
    buffers.check()
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
def test_they_are_the_same_bits_on_any_number_of_processes(world_size):
    for grows_from in (0, 2, NUM_STEPS):
        (alone,) = run_distributed(merge, 1, grows_from)
        assert alone["mask"] == [torch.tensor(0.3).item(), -torch.inf]
        assert len(alone["seen"]) == (NUM_STEPS if grows_from < NUM_STEPS else 1)
        assert alone["count"] == 2**60 + NUM_STEPS
        for buffers in run_distributed(merge, world_size, grows_from):
            assert buffers == alone


@pytest.mark.parametrize("num_samples", [1, 49])
def test_the_only_lane_of_a_step_leaves_them_as_it_made_them(num_samples):
    """On one process nothing is compared or merged then; 49 times a float64 by 49 may be another one."""
    module = Statistics()
    for step in range(NUM_STEPS):
        module(step, 0, 2)
    made = {name: buffer.tolist() for name, buffer in module.named_buffers()}
    for world_size in (1, 2):
        for buffers in run_distributed(merge, world_size, 2, num_samples, 49):
            assert buffers == made
