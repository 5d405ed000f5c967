"""What a loop of one's own goes on with: metrics that come late, data of its own making, equal models."""

import copy
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lanewise import Lanes, Loss
from lanewise.engine.own_loop.checkpoints import OwnCheckpoints
from lanewise.errors import CheckpointError, RunDirError, WorldError
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint import saver
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.dir import lock_folder
from lanewise.testing import run_distributed
from tests.distributed.tasks import state_bytes
from tests.slow import slow
from tests.unit.engine.own_loop.test_lanes import make_lanes

SAMPLES = TensorDataset(torch.arange(64.0).view(32, 2) / 64)


def report(world: World, folder: str, last_step: int) -> list[list[str]]:
    """Go on up to a step; even steps report a metric more. Return the names that each step knew."""
    lanes = make_lanes(world, global_batch_size=8)
    model = lanes.prepare(nn.Linear(2, 1))
    checkpoints = lanes.checkpoints(folder, model=model)
    told = []
    for step in lanes.steps(SAMPLES, first_step=checkpoints.step):
        if step.number == last_step:
            break
        for (batch,) in step:
            even = {} if step.number % 2 else {"even": (batch.sum(), 1)}
            loss = model(batch).sum()
            step.backward(Loss(loss, len(batch), metrics={"usual": (loss, len(batch)), **even}))
        told.append(list(step.metrics))
    checkpoints.save(last_step)
    checkpoints.finish()
    return told


def test_the_first_step_after_a_resume_may_lack_a_metric(tmp_path):
    """The names were those of that step alone, so the next step was an error."""
    assert run_distributed(report, 1, str(tmp_path), 1) == [[["even", "usual"]]]
    assert run_distributed(report, 2, str(tmp_path), 4) == [[["even", "usual"]] * 3] * 2


class Environment:
    """Where a loop plays; its rollouts depend on the model and on how often it played."""

    def __init__(self) -> None:
        self.num_played = 0

    def play(self, model: nn.Module) -> TensorDataset:
        self.num_played += 1
        inputs = torch.arange(32.0).view(16, 2) / 32 + self.num_played
        with torch.no_grad():
            return TensorDataset(inputs, model(inputs))

    def state_dict(self) -> dict[str, Any]:
        return {"num_played": self.num_played}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_played = state["num_played"]


NUM_STEPS, NUM_PASSES = 2, 2
"""Steps in one pass over a rollout, and passes over it."""


def reinforce(world: World, folder: str, num_rollouts: int, weights_change: bool) -> dict[str, bytes]:
    """Go on up to a number of rollouts, or of passes over samples with weights of the loop's own."""
    lanes = make_lanes(world, global_batch_size=8)
    model = lanes.prepare(nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.1)))
    optimizer, environment = torch.optim.SGD(model.parameters(), lr=0.1), Environment()
    checkpoints = lanes.checkpoints(folder, model=model, optimizer=optimizer, environment=environment)
    for first_step in range(checkpoints.step, num_rollouts * NUM_STEPS * NUM_PASSES, NUM_STEPS * NUM_PASSES):
        rollout = environment.play(model)
        options: dict[str, Any] = {
            "sample_weights": rollout.tensors[1].square().flatten() + 0.1,
            "order": "weighted",
        }
        if weights_change:
            rollout = TensorDataset(rollout.tensors[0] - environment.num_played, torch.ones(16, 1))
        steps = lanes.steps(
            rollout, first_step=first_step, data_changes=True, **(options if weights_change else {})
        )
        for _ in range(NUM_PASSES):
            for step in steps:
                for inputs, targets in step:
                    step.backward((model(inputs) - targets - 1).square().mean())
                optimizer.step()
        checkpoints.save(first_step + NUM_STEPS * NUM_PASSES)
    checkpoints.finish()
    return state_bytes(model)


@pytest.mark.parametrize("weights_change", [*slow(False), True])
def test_data_of_the_loops_own_making_go_on_to_the_same_bytes(tmp_path, weights_change):
    """The checkpoint was of another run, since it knew every sample, or every weight."""
    alone = run_distributed(reinforce, 1, str(tmp_path / "alone"), 3, weights_change)[0]
    run_distributed(reinforce, 1, str(tmp_path / "stopped"), 1, weights_change)
    assert run_distributed(reinforce, 2, str(tmp_path / "stopped"), 3, weights_change) == [alone, alone]


def astray(world: World, folder: str) -> list[str]:
    """Change a prepared model on one process alone: a weight, then a buffer that no state dict has."""
    lanes = make_lanes(world)
    model = nn.Linear(3, 1)
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int8), persistent=False)
    lanes.prepare(model)
    checkpoints = lanes.checkpoints(folder, model=model)
    checkpoints.save(1)
    said = []
    before = copy.deepcopy(model.state_dict())
    for tensor in (model.weight, model.counts):
        with torch.no_grad():
            tensor[..., 2] += world.rank
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(2)
        said.append(str(caught.value))
        model.load_state_dict(before)
    checkpoints.finish()
    return said


def test_a_prepared_model_that_differs_between_processes_is_not_saved(tmp_path):
    """It was taken for equal, and the checkpoint had parts of several models."""
    for said in run_distributed(astray, 3, str(tmp_path)):
        assert len(said) == 2
        for message in said:
            assert message.startswith("the state of model differs between processes (ranks ")
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", ".lock"}


def astray_in_optimizer(world: World, folder: str) -> str:
    """Change what the optimizer keeps of a weight, on one process alone."""
    lanes = make_lanes(world)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lanes.prepare(model)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(1, 3)
    checkpoints = lanes.checkpoints(folder, model=model, optimizer=optimizer)
    checkpoints.save(1)
    optimizer.state[model.weight]["momentum_buffer"][0, 1] *= -1 if world.rank == 1 else 1
    with pytest.raises(WorldError) as caught:
        checkpoints.save(2)
    checkpoints.finish()
    return str(caught.value)


def test_an_optimizer_that_differs_between_processes_is_not_saved(tmp_path):
    """It was taken for equal where its model is."""
    for said in run_distributed(astray_in_optimizer, 3, str(tmp_path)):
        assert said.startswith("optimizer/state/model.weight/momentum_buffer differs between processes")
        assert "after step 2, where all must have the same: rank 1 (" in said
    (saved,) = tmp_path.glob("step-*")
    assert set(Manifest.read(saved).digests) == {
        "model/weight",
        "model/bias",
        "optimizer/state/model.weight/momentum_buffer",
    }


def begin(world: World, folder: Path, **options: Any) -> tuple[Lanes, OwnCheckpoints]:
    lanes = make_lanes(world)
    return lanes, lanes.checkpoints(folder, model=lanes.prepare(nn.Linear(2, 1)), **options)


@pytest.mark.parametrize("options", [{}, {"before_step": 3}])
def test_what_a_process_still_saves_is_found_when_it_opens_the_folder_again(tmp_path, monkeypatch, options):
    """The next cell of a notebook began at 0, and removed the folder of the save that was on its way."""
    write = saver.write_json

    def write_late(*arguments: Any) -> Any:
        time.sleep(0.5)
        return write(*arguments)

    monkeypatch.setattr(saver, "write_json", write_late)
    world = LocalWorld(torch.device("cpu"))
    lanes, checkpoints = begin(world, tmp_path / "mine")
    checkpoints.save(3)
    again, found = begin(world, Path(os.path.relpath(tmp_path)) / "mine", **options)
    assert found.step == 3
    lanes.close()
    with ExitStack() as stack:  # the second one still has the folder, unless it only looks at a step
        if not options:
            with pytest.raises(RunDirError, match=rf"in use by process {os.getpid()} on"):
                lock_folder(tmp_path / "mine", stack, "the folder", "another")
            again.close()
        lock_folder(tmp_path / "mine", stack, "the folder", "another")


def open_in_use(world: World, folder: str) -> tuple[str, int]:
    """Open the folder of another process, and then only to see a step of it again."""
    with pytest.raises(RunDirError) as caught:
        begin(world, Path(folder))
    return str(caught.value), begin(world, Path(folder), before_step=1)[1].step


def test_a_folder_that_another_process_saves_to_is_an_error_on_every_rank(tmp_path):
    """Two processes removed each other's saves."""
    with ExitStack() as stack:
        lock_folder(tmp_path, stack, "the folder", "another")
        for said, step in run_distributed(open_in_use, 2, str(tmp_path)):
            assert said.startswith(
                f"the folder of checkpoints {tmp_path} is in use by process {os.getpid()} on "
            )
            assert said.endswith("Choose another folder, or wait for that one to end.")
            assert step == 0
