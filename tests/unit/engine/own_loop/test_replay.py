"""One lane of a step of a loop of one's own, again and alone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lanewise.errors import TaskError
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.tasks import state_bytes
from tests.slow import slow
from tests.unit.engine.own_loop.test_lanes import make_lanes

SAMPLES = TensorDataset(torch.arange(44 * 3.0).view(44, 3).sin())
"""Eleven micro-batches: the third step of an epoch has three of four lanes."""
NUM_STEPS = 9


def loop(world: World, folder: str, before_step: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Train with dropout and running statistics, and save every two steps; yield before each step."""
    lanes = make_lanes(world, global_batch_size=16, micro_batch_size=4, equality="exact")
    model = lanes.prepare(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    checkpoints = lanes.checkpoints(folder, before_step=before_step, model=model, optimizer=optimizer)
    steps = lanes.steps(SAMPLES, first_step=checkpoints.step)
    while steps.epoch < NUM_STEPS // 3:
        for step in steps:
            yield step, model
            step_losses = []
            for (inputs,) in step:
                loss = model(inputs).square().mean()
                step_losses.append(loss.item())
                step.backward(loss)
            optimizer.step()
            if (step.number + 1) % 2 == 0:
                checkpoints.save(step.number + 1)
            yield step_losses, model
    checkpoints.finish()


def train(world: World, folder: str) -> tuple[list[list[float]], Any]:
    """Return the losses of this process's lanes in each step, and the state at the end."""
    yielded = list(loop(world, folder))
    return [losses for losses, _ in yielded[1::2]], state_bytes(yielded[-1][1])


def replay(world: World, folder: str, number: int) -> tuple[list[int], list[float], Any]:
    """Return the steps that were taken up to one, the losses of its lanes alone, and the state at the end."""
    taken, losses, model = [], [], None
    for step, model in loop(world, folder, before_step=number):
        if isinstance(step, list):
            continue
        taken.append(step.number)
        if step.number == number:
            before = state_bytes(model), torch.get_rng_state().tolist()
            for lane in (2, 0, 1):
                with step.replay(lane) as (inputs,):
                    losses.append(model(inputs).square().mean().item())
                assert (state_bytes(model), torch.get_rng_state().tolist()) == before
    return taken, losses, state_bytes(model)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file): (file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(("number", "world_size"), [(5, 1), (6, 2), *slow((1, 3), (8, 1))])
def test_a_lane_has_the_loss_that_it_had_and_nothing_is_written(tmp_path, number, world_size):
    """On one process, of a run on any number of them; the run then goes on to the same end."""
    trained = run_distributed(train, world_size, str(tmp_path))
    (tmp_path / "step-000002.tmp-ab").mkdir()  # as a save that goes on has it
    before = contents(tmp_path)
    ((taken, losses, end),) = run_distributed(replay, 1, str(tmp_path), number)
    first = number // 2 * 2 if number > 5 else 0  # earlier checkpoints are no longer there
    assert taken == list(range(first, NUM_STEPS))
    of_step = [loss for of_rank, _ in trained for loss in of_rank[number]]
    assert losses == [of_step[lane] for lane in (2, 0, 1)]
    assert end == trained[0][1]
    assert contents(tmp_path) == before
    assert (tmp_path / "step-000002.tmp-ab").exists()


def refused(world: World, folder: str, number: int) -> str:
    """Ask for lane 3, which the last step of an epoch does not have."""
    for step, _ in loop(world, folder):
        if not isinstance(step, list) and step.number == number:
            with pytest.raises(TaskError) as error, step.replay(3):
                pass
            return str(error.value)
    raise AssertionError


@pytest.mark.parametrize(
    ("world_size", "number", "said"),
    [(1, 2, r"got lane 3, 1 processes, and samples of the lanes \[0, 1, 2\]"), (2, 0, "got lane 3, 2 proc")],
)
def test_what_cannot_be_replayed_is_one_error(tmp_path, world_size, number, said):
    for error in run_distributed(refused, world_size, str(tmp_path), number):
        assert re.search(said, error)
