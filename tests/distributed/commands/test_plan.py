"""What `lanewise plan` says of memory, beside what tensors really take in training."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lanewise import Task
from lanewise.commands.plan.formulas import peak_memory
from lanewise.commands.plan.measure import largest_batch, measure
from lanewise.commands.plan.memory import Setting
from lanewise.config import EvaluateConfig, RunConfig
from lanewise.config.class_path import add_search_path
from lanewise.config.load import Override, load_config
from lanewise.data import LaneBatch
from lanewise.engine.engine import build_engine
from lanewise.engine.run.build import build_task
from lanewise.processes.device.live_storage import LiveStorage
from lanewise.processes.device.nested import copied
from lanewise.processes.world.world import LocalWorld, World
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure
from tests.slow import slow

EXAMPLES = Path(__file__).parents[3] / "examples"
REDUCERS = ("single", "data_parallel", "balanced_data_parallel", "ddp", "fsdp")


def load_example(name: str, **overrides: Any) -> RunConfig:
    """An example that takes three steps on the CPU and evaluates nothing."""
    given = {"train.max_steps": 3, "train.epochs": None, "distributed.device_type": "cpu"} | overrides
    config = load_config(
        str(EXAMPLES / name / f"{name}.yaml"),
        [Override(key, "null" if value is None else str(value)) for key, value in given.items()],
    )
    return replace(config, evaluate=EvaluateConfig())


@contextmanager
def noting_resizes(live: LiveStorage) -> Iterator[None]:
    """Tell it what `resize_` frees, by which FSDP frees what it gathered."""
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        live.note_size(storage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize_and_note)
        yield


def train_and_measure(world: World, config: RunConfig, batch: LaneBatch | None = None) -> int:
    """The most bytes of tensors that were alive in a step of this process; the dataset is not counted.

    Args:
        world: the processes.
        config: the run.
        batch: what each lane is given; None: its own micro-batch.
    """
    add_search_path(config.search_path)
    task: Any = build_task(config)
    dataset = task.train_dataset()
    task.train_dataset = lambda: dataset
    task.eval_datasets = dict
    if batch is not None:
        task.collate = lambda _samples: copied(batch.data)
    with LiveStorage() as live, noting_resizes(live):
        engine = build_engine(config, world, task)
        live.take_peak()
        list(engine.steps())
    return live.peak_bytes


def ratios(name: str, reducers: tuple[str, ...], **overrides: Any) -> dict[str, float]:
    """What plan says / what was measured on the process that needs most, by reducer; two devices."""
    config = load_example(name, **overrides)
    add_search_path(config.search_path)
    batch = largest_batch(config)
    measured = measure(config, batch, "cpu")
    found = {}
    for reducer in reducers:
        num_devices = 1 if reducer == "single" else 2
        options = {"distributed.reducer": reducer, "distributed.devices": num_devices}
        run = load_example(name, **overrides, **options)
        peaks = run_distributed(train_and_measure, run.distributed.num_processes or 1, run, batch)
        setting = Setting(
            reducer=run.distributed.reducer, num_devices=num_devices, num_lanes=run.batch.num_lanes
        )
        found[reducer] = peak_memory(measured, setting).num_bytes / max(peaks)
    return found


@pytest.mark.slow
def test_plan_says_what_ddp_takes_where_it_shares_the_optimizer_out():
    assert ratios("mnist", ("ddp",), **{"distributed.shard_optimizer": True})["ddp"] == pytest.approx(
        1, rel=0.1
    )


def test_plan_says_what_mnist_takes_alone_and_under_ddp():
    assert ratios("mnist", ("single", "ddp")) == pytest.approx({"single": 1, "ddp": 1}, rel=0.1)


class Recurrent(Task):
    """An LSTM, of which oneDNN's kernel keeps a workspace that torch's fake one does not know."""

    def build_model(self) -> nn.Module:
        return nn.LSTM(8, 16, num_layers=2, batch_first=True)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.randn(48, 30, 8))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])[0]

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean()


class Gated(Recurrent):
    """A GRU, which is made of small operators."""

    def build_model(self) -> nn.Module:
        return nn.GRU(8, 16, num_layers=2, batch_first=True)


class Autoencoder(Recurrent):
    """A ConvNet with a loss of images, whose mean keeps the memory of what it was taken of."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv1d(30, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 30, 3, padding=1))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[0])


@pytest.mark.parametrize("task", [Recurrent, *slow(Gated), Autoencoder])
def test_plan_says_what_operators_take_whose_fake_results_are_smaller(task):
    """It was a third of an LSTM's, and 4 % less than a ConvNet's."""
    config = configure(task, num_lanes=2, micro_batch_size=8, steps=3)
    config = replace(config, train=replace(config.train, max_grad_norm=None))
    batch = largest_batch(config)
    measured = measure(config, batch, "cpu")
    setting = Setting(reducer="single", num_devices=1, num_lanes=2)
    planned = peak_memory(measured, setting).num_bytes
    assert measured.why_real == ""
    assert planned == pytest.approx(
        train_and_measure(LocalWorld(torch.device("cpu")), config, batch), rel=0.01
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("equality", ["close", "exact"])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mnist", {}),
        ("char_gpt", {}),
        ("char_gpt", {"memory.activation_checkpointing": "auto"}),
        ("char_gpt", {"precision": "bf16", "batch.global_batch_size": 48}),  # three lanes each
        ("session_rec", {}),
        ("session_rec", {"memory.activation_checkpointing": "auto", "train.ema_decay": 0.9}),
        ("question_answering", {}),
    ],
)
def test_plan_says_what_the_examples_take_under_every_reducer(name, overrides, equality):
    found = ratios(name, REDUCERS, **overrides, **{"distributed.equality": equality})
    assert found == pytest.approx(dict.fromkeys(REDUCERS, 1), rel=0.1), found
