"""Each process updates some of the parameters; models and checkpoints are those of a run without shards."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.config import ClassConfig, DistributedConfig, OptimizerConfig, RunConfig, SchedulerConfig
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.run import Run
from lanewise.engine.state.optimizer_shards import OptimizerShards
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver
from lanewise.testing import run_distributed
from tests.distributed.reduce.test_reducers import NotContiguous
from tests.distributed.tasks import configure, state_bytes
from tests.slow import slow

STEPS, SAVED = 6, 3


class Grouped(NotContiguous):
    """Two groups of parameters of many layouts and dtypes, not in the model's order; one is frozen."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.head.bias = nn.Parameter(torch.zeros(31), requires_grad=False)
        return model

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [{"params": rest[::-1], "weight_decay": 0.1}, {"params": [first], "lr": 0.02}]


def configured(
    optimizer: str = "AdamW", *, sharded: bool = True, equality: str = "exact", **keys
) -> RunConfig:
    config = configure(Grouped, num_lanes=4, steps=STEPS, equality=equality)
    section = OptimizerConfig(class_path=f"torch.optim.{optimizer}", init_args={"lr": 0.01})
    distributed = replace(config.distributed, shard_optimizer=sharded)
    return replace(config, optimizer=section, distributed=distributed, **keys)


def go_on(world, config: RunConfig, folder: Path) -> Run:
    """Build a run, and go on from the checkpoint in a folder if there is one."""
    set_determinism(config.distributed.equality, threads=1)
    run = build_run(config, world)
    resume_run(run, CheckpointFolder(folder), allow=())
    return run


def take_steps(run: Run, folder: Path, steps: range) -> list[float]:
    """Take some steps, and save; return the norm of the last gradient."""
    engine = Engine(replace(run, last_step=steps.stop), first_step=steps.start)
    norms = [float(report.interval.grad_norm()) for report in engine.steps()]
    saver = Saver(CheckpointFolder(folder), run.world, keep_last=9, keep_best=0, sign=1)
    saver.save(engine.run.state.take(), Manifest(steps.stop, None, engine.run.identity, ()))
    saver.finish()
    return norms[-1:]


def train(world, config: RunConfig, folder: Path, steps: range = range(STEPS)) -> Any:
    run = go_on(world, config, folder)
    norms = take_steps(run, folder, steps)
    average = run.training.average
    averaged = {} if average is None else state_bytes(average.module)
    return state_bytes(run.training.model), averaged, norms


def trained(config: RunConfig, world_size: int, *args: Any) -> Any:
    first, *others = run_distributed(train, world_size, config, *args)
    assert all(other == first for other in others)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_the_bytes_are_those_of_one_process(optimizer, tmp_path):
    """Of Adafactor as well, which looks at whole parameters; it takes no complex ones."""
    task = configured(optimizer).task
    if optimizer == "Adafactor":
        task = ClassConfig(class_path="tests.distributed.reduce.test_reducers.Whole")
    config = configured(optimizer, task=task)
    alone = trained(config, 1, tmp_path / "1")
    for world_size in (2, 3):
        assert trained(config, world_size, tmp_path / f"{world_size}") == alone


def with_everything(*, sharded: bool, equality: str = "exact") -> RunConfig:
    """Clipping, a moving average, a scheduler, and fp16 with its loss scale."""
    config = configured(sharded=sharded, equality=equality, precision="fp16")
    scheduler = SchedulerConfig(name="linear", warmup=2)
    return replace(config, scheduler=scheduler, train=replace(config.train, ema_decay=0.9))


@pytest.mark.parametrize("equality", ["close", *slow("exact")])
def test_sharding_changes_no_byte_of_what_else_an_update_has(equality, tmp_path):
    whole, shards = (with_everything(sharded=sharded, equality=equality) for sharded in (False, True))
    assert trained(shards, 2, tmp_path / "shards") == trained(whole, 2, tmp_path / "whole")


@pytest.mark.parametrize(
    "layouts", [[(True, 2), (False, 1)], *slow([(True, 2), (False, 1), (True, 3), (False, 2)])]
)
def test_a_run_goes_on_with_and_without_shards_on_other_numbers_of_processes(tmp_path, layouts):
    whole = trained(with_everything(sharded=False), 1, tmp_path / "whole")
    for number, (sharded, world_size) in enumerate(layouts):
        folder, (was_sharded, old_size) = tmp_path / f"{number}", layouts[number - 1]
        trained(with_everything(sharded=was_sharded), old_size, folder, range(SAVED))
        resumed = trained(with_everything(sharded=sharded), world_size, folder, range(SAVED, STEPS))
        assert resumed == whole, number


def hold(world, config: RunConfig, folder: Path) -> Any:
    """Name the parameters whose state a process holds after some steps, and when another run has read it."""
    held = []
    for steps in (range(SAVED), range(SAVED, STEPS)):
        run = go_on(world, config, folder)
        names = {parameter: name for name, parameter in run.training.model.named_parameters()}
        state = run.training.optimizer.state
        held.append(sorted(names[parameter] for parameter in state))
        take_steps(run, folder, steps)
        held.append(sorted(names[parameter] for parameter in state))
    return held, sum(value.nbytes for values in state.values() for value in values.values())


def test_each_state_is_held_by_one_process_and_read_by_one(tmp_path):
    (((_, whole, *_), whole_bytes),) = run_distributed(hold, 1, configured(), tmp_path / "1")
    for world_size in (2, 3):
        results = run_distributed(hold, world_size, configured(), tmp_path / f"{world_size}")
        for (none, before, read, after), _ in results:
            assert none == []
            assert before == read == after
        assert sorted(name for (_, before, *_), _ in results for name in before) == whole
        assert sum(num_bytes for _, num_bytes in results) == whole_bytes
        assert max(num_bytes for _, num_bytes in results) < 0.6 * whole_bytes


def held_at_first(world, config: RunConfig, folder: Path) -> Any:
    """Return of which parameters the process holds a state before the first step."""
    run = go_on(world, config, folder)
    names = {parameter: name for name, parameter in run.training.model.named_parameters()}
    return sorted(names[parameter] for parameter in run.training.optimizer.state)


@pytest.mark.parametrize("layouts", [[(True, 2), (True, 3)], *slow([(True, 3), (False, 1), (True, 2)])])
def test_a_state_that_is_made_before_the_first_step_is_shared_out_too(tmp_path, layouts):
    """Adagrad makes it, of a frozen parameter as well: each process saved all, and none could read it."""
    whole = trained(configured("Adagrad", sharded=False), 1, tmp_path / "whole")
    held = run_distributed(held_at_first, 2, configured("Adagrad"), tmp_path / "held")
    both = set(held[0]) & set(held[1])
    assert both == {"head.bias"}
    assert len(held[0]) < len({*held[0], *held[1]}) > len(held[1])
    folder, steps = tmp_path / "parts", [0, 2, 4, STEPS]
    for number, (sharded, world_size) in enumerate(layouts):
        taken = range(steps[number], STEPS if number == len(layouts) - 1 else steps[number + 1])
        found = trained(configured("Adagrad", sharded=sharded), world_size, folder, taken)
    assert found == whole


def test_the_groups_are_narrowed_while_the_optimizer_steps(caplog):
    """A scheduler, or whoever looks at gradients before the step, sees all parameters.

    torch puts its hooks into the step of each class of which there is an optimizer, so that they are called
    twice where a step calls that of its base class.
    """
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    sizes = []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            sizes.append(len(self.param_groups[0]["params"]))
            return super().step(closure)

    class FirstOfTwo(LocalWorld):
        world_size = 2

    optimizer = Noting(model.parameters(), lr=0.1)
    with caplog.at_level(logging.INFO):
        shards = OptimizerShards(optimizer, model, FirstOfTwo(torch.device("cpu")))
    optimizer.step()
    assert sizes == [sum(map(shards.updates, model.parameters()))] == [1]
    assert len(optimizer.param_groups[0]["params"]) == 4
    assert "each process updates 45 % to 55 % of the parameters" in caplog.text


def train_line(world):
    """Train more processes than there are parameters to update."""
    config = configure("tests.unit.engine.run.test_resume.Line", num_lanes=4, steps=2)
    config = replace(config, distributed=DistributedConfig(shard_optimizer=True, equality="exact"))
    engine = build_engine(config, world)
    for _ in engine.steps():
        pass
    return state_bytes(engine.training.model)


def test_some_processes_may_have_nothing_to_update():
    first, *others = run_distributed(train_line, 4)
    assert others == [first] * 3
