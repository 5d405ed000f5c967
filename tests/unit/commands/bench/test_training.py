"""What `lanewise bench --evaluate` trains: the steps of a run, one evaluation, and a digest."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lanewise.commands.bench.job import digest_of
from lanewise.commands.bench.training import Trained, TrainingJob
from lanewise.config import EvaluateConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.testing import run_distributed
from tests.distributed.tasks import Sentences, Smooth, configure


class Held(Smooth):
    """Evaluates on some of its sentences, and asks where in the run the weights are."""

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": Sentences(7)}

    def eval_loss(self, outputs: Any, batch: Any) -> Any:
        return torch.tensor(float(self.progress.number))


def train(world: World, config: RunConfig, num_steps: int) -> Trained:
    set_determinism("exact", threads=1)
    return Trained(**TrainingJob(config, num_steps=num_steps).run(world))


def test_the_model_and_the_values_are_those_of_a_run_of_so_many_steps():
    """`evaluate.every_steps` is not followed: each evaluation would be in the time."""
    config = configure(Held, num_lanes=4, steps=3)
    set_determinism("exact", threads=1)
    engine = build_engine(config, LocalWorld(torch.device("cpu")))
    list(engine.steps())
    long = replace(configure(Held, num_lanes=4, steps=50), evaluate=EvaluateConfig(every_steps=1))
    for trained in run_distributed(train, 2, long, 3):
        assert (trained.num_steps, trained.model) == (3, digest_of(engine.training.model))
        assert trained.values == {"held_out/loss": 3.0}
        assert trained.seconds > 0


@pytest.mark.parametrize("num_steps", [2, 9])
def test_a_run_that_ends_before_is_trained_to_its_end(num_steps):
    """Of a task without eval datasets there are time and model."""
    config = configure(Smooth, num_lanes=4, num_samples=24)
    config = replace(config, train=replace(config.train, max_steps=None, epochs=1))
    trained = train(LocalWorld(torch.device("cpu")), config, num_steps)
    assert trained.num_steps == min(num_steps, 3)
    assert trained.values == {}
    assert trained.seconds > 0


def test_a_run_of_fewer_steps_ends_where_it_says():
    config = configure(Smooth, num_lanes=4, steps=2)
    assert train(LocalWorld(torch.device("cpu")), config, 5).num_steps == 2
