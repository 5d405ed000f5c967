"""The scheduler of a run; one that follows an evaluation lowers the learning rate alike on every layout."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.checkpoint import CheckpointFolder, Saver
from lanewise.config import CheckpointConfig, ClassConfig, EvaluateConfig, EveryConfig, RunConfig
from lanewise.engine import Engine, Saving, build_run, resume
from lanewise.engine.scheduler import build_scheduler
from lanewise.errors import CheckpointError, ConfigError
from lanewise.run_dir import RunDir
from lanewise.testing import run_distributed
from lanewise.world.determinism import set_determinism
from lanewise.world.world import LocalWorld, World
from tests.distributed.tasks import Smooth, configure

ONE_CYCLE = ClassConfig(
    class_path="torch.optim.lr_scheduler.OneCycleLR", init_args={"max_lr": 0.1, "total_steps": -1}
)
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
LR = 0.5
STEPS = 8


class Stuck(Smooth):
    """Is evaluated, and never gets better by as much as the scheduler asks for."""

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": self.train_dataset()}


def following(
    *, warmup_steps: int | None = None, best: str | None = "held_out/loss", **options: Any
) -> RunConfig:
    """A run that is evaluated after every second step, and halves its learning rate each time."""
    config = configure(Stuck, num_lanes=4, steps=STEPS, optimizer="torch.optim.SGD", lr=LR)
    options = {"factor": 0.5, "patience": 0, "threshold": 0.999, **options}
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, warmup_steps=warmup_steps),
        scheduler=ClassConfig(class_path=PLATEAU, init_args=options),
        evaluate=EvaluateConfig(every_steps=2, best=best, best_mode="min"),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=2)),
    )


def train(world: World, config: RunConfig, folder: str) -> tuple[list[float], dict[str, bytes]]:
    """Go on from what is there and train; return the learning rate of each step, and the weights."""
    set_determinism("exact", 1)
    run = build_run(config, world)
    run_dir = RunDir(Path(folder))
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume(run, checkpoints, ())
    saver = Saver(checkpoints, world, keep_last=9, keep_best=0, sign=-1)
    saving = Saving(
        saver,
        run.state,
        config.checkpoint,
        run.schedule,
        run.identity,
        world.rank,
        run.last_step,
        lambda: False,
    )
    rates: list[float] = []
    run.training.optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
    Engine(run, first_step=first_step, saving=saving).fit(run_dir)
    world.all_gather_object(None)
    weights = {name: one.numpy().tobytes() for name, one in run.training.model.state_dict().items()}
    return rates, weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run_distributed(train, 1, following(), str(folder))


def test_the_learning_rate_falls_after_an_evaluation_that_found_nothing_better(whole):
    rates, _ = whole[1]
    assert rates == [LR, LR, LR, LR, LR / 2, LR / 2, LR / 4, LR / 4]


def test_two_processes_end_with_the_same_bytes(whole, tmp_path):
    for result in run_distributed(train, 2, following(), str(tmp_path)):
        assert result == whole[1]


def test_a_run_goes_on_with_its_learning_rate_and_what_was_the_best(whole, tmp_path):
    run_distributed(train, 1, following(), str(tmp_path))
    folder = CheckpointFolder(RunDir(tmp_path).checkpoints)
    for step in (6, 8):  # the run is cut after its fourth step
        for path in folder.of_step(step).iterdir():
            path.unlink()
        folder.of_step(step).rmdir()
    for rates, weights in run_distributed(train, 2, following(), str(tmp_path)):
        assert rates == whole[1][0][4:]
        assert weights == whole[1][1]


def test_a_warm_up_comes_before(tmp_path):
    ((rates, _),) = run_distributed(train, 1, following(warmup_steps=3), str(tmp_path))
    assert rates[:3] == pytest.approx([LR / 4, LR / 2, LR * 3 / 4])
    # The evaluation after step 1 tells nothing; that after step 3 is the first, and the next finds no better.
    assert rates[3:] == pytest.approx([LR, LR, LR, LR / 2, LR / 2])


def test_the_mode_is_that_of_the_best_value():
    config = following()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    for mode in ("min", "max"):
        evaluate = dataclasses.replace(config.evaluate, best_mode=mode)
        _, plateau = build_scheduler(dataclasses.replace(config, evaluate=evaluate), optimizer)
        assert plateau is not None
        assert plateau.scheduler.mode == mode


def test_a_run_cannot_go_on_with_another_value(whole):
    config = following()
    evaluate = dataclasses.replace(config.evaluate, best_mode="max")
    set_determinism("exact", 1)
    run = build_run(dataclasses.replace(config, evaluate=evaluate), LocalWorld(torch.device("cpu")))
    with pytest.raises(CheckpointError, match=r"scheduler was .*'mode': 'min'.*, and is .*'mode': 'max'"):
        resume(run, CheckpointFolder(RunDir(whole[0]).checkpoints), ())


def test_a_value_that_torch_refuses_names_the_section():
    config = dataclasses.replace(configure(Smooth), scheduler=ONE_CYCLE)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    said = r"scheduler: torch\.optim\.lr_scheduler\.OneCycleLR refuses its arguments: .* but got -1\."
    with pytest.raises(ConfigError, match=said):
        build_scheduler(config, optimizer)
