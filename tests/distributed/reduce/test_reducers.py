"""Every reducer leaves the bytes of a single device on every number of them, and goes on from the others."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.config import DistributedConfig, FSDPConfig, RunConfig
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver
from lanewise.task import Task
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, TinyTransformer, configure, state_bytes, train
from tests.slow import slow

IN_PROCESS = ("data_parallel", "balanced_data_parallel")
LAYOUTS = [
    *((reducer, num_devices) for reducer in ("ddp", *IN_PROCESS) for num_devices in (1, 2, 3, 4)),
    *(("fsdp", num_devices) for num_devices in (2, 3, 4)),
]


class Everything(TinyTransformer):
    """Dropout, a tied embedding, a parameter that some lanes use and one that none uses, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm(self.embedding(tokens).flatten(0, 1)).unflatten(0, tokens.shape)
        return super().forward(tokens) + self.head(normed)


class Whole(Language):
    """Weighted by tokens, with a partial last step of five lanes."""

    def build_model(self) -> nn.Module:
        return Everything()


class Strided(Everything):
    """Parameters that are not contiguous: channels_last, transposed, sliced in two orders; a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(16, 2).t())
        self.phases = nn.Parameter(torch.randn(2, 8, dtype=torch.complex64).t())
        self.sliced = nn.Parameter(torch.randn(62, 16)[::2])
        self.sliced_and_transposed = nn.Parameter(torch.randn(16, 62).t()[::2])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        images = self.transposed * self.embedding(tokens).unsqueeze(-2)
        pixels = self.convolution(images.transpose(1, 2)).sum(1)
        pixels = (pixels * self.phases.flatten()).abs()
        heads = self.sliced + (self.sliced_and_transposed if int(tokens.sum()) % 2 else 0.0)
        return super().forward(tokens) + pixels @ heads.t()


class NotContiguous(Language):
    """The same task with such parameters; their order in memory is in no checkpoint."""

    def build_model(self) -> nn.Module:
        return Strided()


def configured(
    reducer: str,
    num_devices: int,
    precision: str = "float32",
    equality: str = "exact",
    task: type[Language] = Whole,
    steps: int | None = None,
) -> RunConfig:
    config = configure(task, steps=steps, precision=precision)  # type: ignore[arg-type]
    distributed = DistributedConfig(
        fsdp=FSDPConfig(blocks=("TransformerEncoderLayer",)),
        reducer=reducer,  # type: ignore[arg-type]
        devices=num_devices,
        device_type="cpu",
        equality=equality,  # type: ignore[arg-type]
    )
    return replace(config, distributed=distributed)


def run(config: RunConfig, function: Any = train, *args: Any) -> Any:
    results = run_distributed(function, config.distributed.num_processes or 1, config, *args)
    assert all(result == results[0] for result in results)
    return results[0]


@cache
def single(precision: str, task: type[Language] = Whole) -> Any:
    return run(configured("single", 1, precision, task=task))


FAST = {
    ("ddp", 2, "float32"),
    ("ddp", 3, "bf16"),
    ("data_parallel", 4, "bf16"),
    ("balanced_data_parallel", 1, "bf16"),
    ("balanced_data_parallel", 3, "float32"),
    ("fsdp", 2, "bf16"),
}
"""What `make test` runs: among it, every reducer and every number of devices."""


def with_either_precision() -> list[Any]:
    """Each layout with both precisions."""
    return [
        pytest.param(
            reducer,
            num_devices,
            precision,
            marks=() if (reducer, num_devices, precision) in FAST else pytest.mark.slow,
        )
        for reducer, num_devices in LAYOUTS
        for precision in ("float32", "bf16")
    ]


@pytest.mark.parametrize(("reducer", "num_devices", "precision"), with_either_precision())
def test_a_reducer_leaves_the_bytes_and_losses_of_one_device(reducer, num_devices, precision):
    assert run(configured(reducer, num_devices, precision)) == single(precision)


@pytest.mark.parametrize(
    ("reducer", "num_devices", "precision"),
    [
        ("ddp", 3, "bf16"),
        ("data_parallel", 2, "bf16"),
        *slow(("ddp", 2, "float32"), ("balanced_data_parallel", 3, "float32")),
    ],
)
def test_parameters_that_are_not_contiguous_end_with_the_same_bytes(reducer, num_devices, precision):
    config = configured(reducer, num_devices, precision, task=NotContiguous)
    assert run(config) == single(precision, NotContiguous)


@pytest.mark.parametrize("reducer", ["data_parallel", *slow("balanced_data_parallel", "fsdp")])
def test_close_is_near(reducer):
    state, losses = run(configured(reducer, 3, equality="close"))
    _, expected = single("float32")
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-2)
    assert state


def train_part(
    world: Any, config: RunConfig, folder: str, last_step: int, task: Task | None = None
) -> dict[str, bytes]:
    """Go on from the newest checkpoint in a folder if there is one, train up to a step, and save there."""
    set_determinism("exact", threads=1)
    run = replace(build_run(config, world, task), last_step=last_step)
    checkpoints = CheckpointFolder(Path(folder))
    engine = Engine(run, first_step=resume_run(run, checkpoints, allow=()))
    for _ in engine.steps():
        pass
    saver = Saver(checkpoints, world, keep_last=9, keep_best=0, sign=1)
    saver.save(engine.run.state.take(), Manifest(last_step, None, engine.run.identity, ()))
    saver.finish()
    return state_bytes(engine.training.model)


EACH_REDUCER = [("single", 1), ("ddp", 2), ("data_parallel", 3), ("balanced_data_parallel", 2), ("fsdp", 3)]


def test_each_reducer_goes_on_from_the_one_before(tmp_path):
    whole, _ = single("float32")
    for layout, last_step in zip(EACH_REDUCER, (1, 2, 3, 4, 5), strict=True):
        found = run(configured(*layout), train_part, str(tmp_path), last_step)
    assert found == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "layouts", "distances"),
    [(Whole, EACH_REDUCER, (1, 2, 3, 4, 5)), (NotContiguous, EACH_REDUCER[:2], (1,))],
)
def test_each_reducer_goes_on_from_the_checkpoints_of_every_other(tmp_path, task, layouts, distances):
    whole, _ = single("float32", task)
    for number, saved in enumerate(layouts):
        run(configured(*saved, task=task), train_part, str(tmp_path / f"{number}"), 3)
        for distance in distances:
            resumed = layouts[(number + distance) % len(layouts)]
            folder = shutil.copytree(tmp_path / f"{number}", tmp_path / f"{number}-{distance}")
            assert run(configured(*resumed, task=task), train_part, str(folder), 5) == whole, (saved, resumed)
