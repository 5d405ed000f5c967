"""Samples that a dataset of files leaves out: the rest is trained on, alike on any number of processes.

The first lane of the second step, and all lanes of the third, lose every sample; others lose some.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric, Metric

from lanewise.config import DataConfig, DistributedConfig
from lanewise.data import FileDataset
from lanewise.engine.engine import build_engine
from lanewise.processes.world.world import World
from tests.distributed.tasks import Language, Sentences, configure
from tests.distributed.tasks import train as train_task
from tests.unit.engine.own_loop.test_lanes import make_lanes, state_of
from tests.worlds import run_distributed

LOST = frozenset({3, 8, 9, *range(16, 24), 31, 44, 45})
"""Of 46 samples in steps of eight, in four lanes of two."""


class Damaged(FileDataset):
    """Sentences, some of which cannot be read."""

    def __init__(self, num_samples: int) -> None:
        self._sentences = Sentences(num_samples)

    @property
    def total_bytes(self) -> int:
        return 8 * sum(map(len, self._sentences.sentences))

    def fingerprint(self) -> str:
        return "damaged"

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        samples = [self._sentences[index] for index in indices if index not in LOST]
        self.num_skipped += len(indices) - len(samples)
        self.read_bytes += 8 * sum(map(len, samples))
        return samples


class DamagedLanguage(Language):
    """Trains and evaluates on them."""

    def train_dataset(self) -> Dataset[Any]:
        return Damaged(self.num_samples)

    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {"held_out": Damaged(self.num_samples)}

    def build_metrics(self) -> dict[str, Metric]:
        return {"length": MeanMetric()}

    def update_metrics(self, metrics: Any, outputs: torch.Tensor, batch: torch.Tensor) -> None:
        metrics["length"].update((batch != 0).sum(dim=1))


class Normed(DamagedLanguage):
    """With a buffer that each lane changes."""

    def build_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(31, 8)
                self.norm = nn.BatchNorm1d(8)
                self.head = nn.Linear(8, 31)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return self.head(self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))

        return Model()


def train(world: World, config: Any) -> tuple[dict[str, bytes], list[str]]:
    """Train; return the bytes of the state, and the losses: nan of a step without samples."""
    state, losses = train_task(world, config)
    return state, list(map(str, losses))


def config_for(task: type, **options: Any) -> Any:
    distributed = DistributedConfig(**{"equality": "exact", **options.pop("distributed", {})})
    config = configure(task, num_lanes=4, steps=8, num_samples=46, **options)
    return replace(config, data=DataConfig(order="sequential"), distributed=distributed)


def evaluate(world: World, config: Any) -> dict[str, float]:
    """Evaluate the untrained model."""
    evaluation = build_engine(config, world).evaluation
    assert evaluation is not None
    return evaluation.run()[0]


def own_loop(world: World) -> list[dict[str, bytes]]:
    """Train in a loop of one's own, and evaluate."""
    lanes = make_lanes(world, global_batch_size=8)
    task = DamagedLanguage(46)
    model = lanes.prepare(task.build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in lanes.steps(task.train_dataset(), collate=task.collate, order="sequential"):
        for batch in step:
            step.backward(task.loss(model(batch), batch))
        optimizer.step()
    length = MeanMetric()
    for batch in lanes.evaluate(task.train_dataset(), length, collate=task.collate):
        length.update((batch != 0).sum(dim=1))
    return [*state_of(model), {"length": length.compute().numpy().tobytes()}]


def train_each(world: World, configs: Sequence[Any]) -> list[Any]:
    """Train with each configuration in one world."""
    return [train(world, config) for config in configs]


@pytest.mark.parametrize("world_sizes", [(3,), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_the_bytes_are_those_of_one_process(world_sizes):
    configs = [
        config_for(task, precision=precision)
        for task in (DamagedLanguage, Normed)
        for precision in ("float32", "bf16")
    ]
    with_workers = replace(configs[0], data=DataConfig(order="sequential", num_workers=2))
    alone, *_ = run_distributed(train_each, 1, [*configs, configs[0]])
    for world_size in world_sizes:
        assert run_distributed(train_each, world_size, [*configs, with_workers]) == [alone] * world_size


def test_several_devices_of_a_process_go_on():
    expected, *_ = run_distributed(train, 1, config_for(DamagedLanguage))
    configs = [
        config_for(DamagedLanguage, distributed={"reducer": reducer, "devices": 2, "device_type": "cpu"})
        for reducer in ("data_parallel", "balanced_data_parallel")
    ]
    assert run_distributed(train_each, 1, configs) == [[expected, expected]]


def test_a_lane_that_lost_all_samples_takes_part_in_the_collectives_of_fsdp():
    """It was an error: each lane needed a sample for its forward, and now has some that do not count."""
    expected, *_ = run_distributed(train, 1, config_for(DamagedLanguage))
    config = config_for(DamagedLanguage, distributed={"reducer": "fsdp"})
    assert run_distributed(train, 2, config) == [expected] * 2


def test_an_evaluation_counts_what_can_be_read():
    config = config_for(DamagedLanguage)
    alone, *_ = run_distributed(evaluate, 1, config)
    sentences = Sentences(46).sentences
    lengths = [len(one) for number, one in enumerate(sentences) if number not in LOST]
    assert alone["held_out/length"] == pytest.approx(sum(lengths) / len(lengths))
    assert run_distributed(evaluate, 3, config) == [alone] * 3


def test_an_own_loop_goes_on_too():
    alone, *_ = run_distributed(own_loop, 1)
    assert run_distributed(own_loop, 3) == [alone] * 3
