"""Pairs of runs that were made to differ in one thing: the step in which they part, and why, are named."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task
from lanewise.commands.diff import diff as module
from lanewise.commands.diff.diff import DiffReport, diff
from lanewise.commands.jobs.train import TrainJob
from lanewise.config import CheckpointConfig, EveryConfig, IntegrityConfig, OrderConfig, RunConfig
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure
from tests.slow import slow

ROOT = Path(__file__).parents[3]
NUM_STEPS = 9


class Regression(Task):
    """Has dropout, and a sum over more elements than a thread adds up alone.

    Args:
        changed: a sample that is another one; -1: none is.
        constant: whether the weights do not depend on the seed.
    """

    def __init__(self, changed: int = -1, *, constant: bool = False) -> None:
        self.changed = changed
        self.constant = constant

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        for parameter in model.parameters() if self.constant else ():
            nn.init.constant_(parameter, 0.1)
        return model

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
        targets = inputs.sum(1, keepdim=True).tanh()
        if self.changed >= 0:
            inputs[self.changed, 2] += 1
        return TensorDataset(inputs, targets)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss((outputs - batch[1]).square().sum(), len(outputs))


class Summing(Regression):
    """Adds up so many elements that threads share them."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]) + model[0].weight.repeat(3000, 1).sum() * 1e-3


class Edited(Regression):
    """Its sources were edited: another activation."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[1] = nn.Sigmoid()
        return model


class Multiplied(Regression):
    """Its sources were edited: a number in them."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]) * 1.001


class Decayed(Regression):
    """Changes the weights after an update."""

    def after_update(self, model: nn.Module, step: Any) -> None:
        with torch.no_grad():
            model[3].weight.mul_(0.5 if self.progress.number == 4 else 1.0)


class Faulty(Regression):
    """A bit flips after the update of step 6, as of bad memory, while `is_bad`."""

    is_bad = False

    def after_update(self, model: nn.Module, step: Any) -> None:
        if self.is_bad and self.progress.number == 5:
            model[0].weight.data.view(-1).view(torch.int32)[7] ^= 1 << 19


def run_of(
    task: type[Task] = Regression,
    *,
    seed: int = 0,
    threads: int = 1,
    digests: int | None = 1,
    order: str | None = None,
    **given: Any,
) -> RunConfig:
    config = configure(task, num_lanes=4, steps=NUM_STEPS, **given)
    data = config.data if order is None else replace(config.data, order=OrderConfig(class_path=order))
    return replace(
        config,
        train=replace(config.train, seed=seed),
        data=data,
        checkpoint=CheckpointConfig(every=EveryConfig(steps=4), keep_last=9),
        integrity=IntegrityConfig(digest_every_steps=digests),
        distributed=replace(config.distributed, threads=threads, devices=1, device_type="cpu"),
        search_path=str(ROOT),
    )


def train(world: World, run_dir: Path, *configs: RunConfig) -> None:
    """Train a run in one start for each configuration; each but the last one has four steps."""
    run_dir.mkdir(exist_ok=True)
    for number, given in enumerate(configs):
        config = replace(given, train=replace(given.train, run_dir=str(run_dir)))
        if number < len(configs) - 1:
            config = replace(config, train=replace(config.train, max_steps=4))
        set_determinism(config.distributed.equality, config.distributed.threads)
        TrainJob(config, None, (), number > 0, ("optimizer",)).run(world)


def contents(folder: Path) -> dict[Path, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compare(world: World, folder: Path) -> DiffReport:
    """Compare, in this process, the two runs of a folder, which stay as they are."""

    def run_here(job: Any, *, is_fresh: bool) -> Any:
        set_determinism("exact", job.config.distributed.threads)
        return job.run(world)

    module.start, before = run_here, contents(folder)
    found = diff([folder / "a", folder / "b"], trust=True)
    assert contents(folder) == before
    return found


def train_and_compare(world: World, folder: Path, first: RunConfig, *second: RunConfig) -> DiffReport:
    train(world, folder / "a", first)
    Faulty.is_bad = True
    train(world, folder / "b", *second)
    Faulty.is_bad = False
    return compare(world, folder)


SAMPLE = 21
PAIRS = {
    # name: the first run, the starts of the second one, the step, and the kinds of what is named
    "seed": (run_of(), [run_of(seed=1)], 1, ["weights before", "samples"]),
    "learning rate": (run_of(), [run_of(), run_of(lr=0.5)], 5, ["options"]),
    "sample": (run_of(), [run_of(changed=SAMPLE)], None, ["samples"]),
    "threads": (run_of(Summing), [run_of(Summing, threads=2)], None, ["rounding"]),
    "bit": (run_of(Faulty), [run_of(Faulty)], 6, ["record"]),
    "activation": (run_of(), [run_of(Edited)], 1, ["operators"]),
    "number": (run_of(), [run_of(Multiplied)], 1, ["operators"]),
    "random numbers": (
        run_of(order="sequential", constant=True),
        [run_of(order="sequential", constant=True, seed=1)],
        1,
        ["random numbers"],
    ),
    "weights": (run_of(order="sequential"), [run_of(order="sequential", seed=1)], 1, ["weights before"]),
    "update": (run_of(), [run_of(Decayed)], 5, ["update"]),
    "seed without digests": (
        run_of(digests=None),
        [run_of(digests=None, seed=1)],
        1,
        ["weights before", "samples"],
    ),
    "rate without digests": (
        run_of(digests=None),
        [run_of(digests=None), run_of(digests=None, lr=0.5)],
        5,
        ["options"],
    ),
    "bit between digests": (run_of(Faulty, digests=4), [run_of(Faulty, digests=4)], 7, ["record"]),
}


@pytest.mark.parametrize(
    "name",
    [
        *("seed", "learning rate", "sample", "threads", "bit", "activation", "random numbers"),
        *slow(
            "number",
            "weights",
            "update",
            "seed without digests",
            "rate without digests",
            "bit between digests",
        ),
    ],
)
def test_the_step_and_the_kind_of_what_makes_two_runs_part_are_named(tmp_path, name):
    first, second, step, kinds = PAIRS[name]
    (found,) = run_distributed(train_and_compare, 1, tmp_path, first, *second)
    assert not found.is_same
    assert [cause.kind for cause in found.causes] == kinds, [*found.lines()]
    if step is None:  # the lines are of each step
        step = found.comparison.parts["metrics"].first_unequal
    assert {cause.step for cause in found.causes} == {step}
    cause = found.causes[-1]
    told = {
        "sample": f"in lane {cause.lane}, sample {SAMPLE} is another one",
        "threads": "in lane 0, aten.sum.default in the model, test_diff.py",
        "bit": f"{tmp_path / 'b'} wrote other digests of model/0.weight than its replay gives: a device or "
        "its memory was wrong, something is not deterministic, or data changed",
        "activation": "aten.sigmoid.default in module 1",
        "number": "aten.mul.Tensor in the model",
        "random numbers": "draws other random numbers",
        "learning rate": "lr of group 0 is 0.01 and 0.5",
    }
    assert told.get(name, "") in str(cause)


def test_runs_on_one_and_two_devices_are_the_same(tmp_path):
    config = run_of()
    run_distributed(train, 1, tmp_path / "a", config)
    two = replace(config, distributed=replace(config.distributed, devices=2))
    run_distributed(train, 2, tmp_path / "b", two)
    with RunDir(tmp_path / "a").claim(may_hold_run=True):  # as if it still ran
        (found,) = run_distributed(compare, 1, tmp_path)
    assert found.is_same
    assert found.causes == ()
    parts = found.comparison.parts
    assert (parts["digests"].last_equal, parts["metrics"].last_equal) == (NUM_STEPS, NUM_STEPS)
    assert [setting.name for setting in found.settings] == ["config.distributed.devices", "devices.cpu"]
    assert [*found.lines()][-1] == "the same"


def test_in_close_nothing_is_replayed(tmp_path):
    (found,) = run_distributed(
        train_and_compare, 1, tmp_path, run_of(equality="close"), run_of(equality="close", seed=1)
    )
    assert {part: one.first_unequal for part, one in found.comparison.differing.items()} == {
        "metrics": 1,
        "digests": 1,
    }
    assert found.causes == ()
    assert [*found.lines()][-1] == "different, as runs in close may be by rounding, or by what differs above"


def test_a_run_that_cannot_be_replayed_is_compared_as_it_stands(tmp_path):
    run_distributed(train, 1, tmp_path / "a", run_of())
    run_distributed(train, 1, tmp_path / "b", run_of(seed=1))
    record = tmp_path / "b" / "run.jsonl"
    record.write_text(record.read_text().replace("tests.distributed.commands.test_diff", "gone"))
    (found,) = run_distributed(compare, 1, tmp_path)
    assert found.causes == ()
    assert "gone" in found.failure
    assert not found.is_same
