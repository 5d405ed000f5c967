"""A run goes on before a step of an epoch whose samples are all missing, which fixes no form."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lanewise import Loss
from lanewise.config import FSDPConfig, RunConfig
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.data.test_missing_samples import gappy
from tests.distributed.engine.test_several_losses import TwoLosses, Unknown
from tests.distributed.engine.test_state import ByBatch, ByRows, Queue
from tests.distributed.reduce.test_reducers import train, train_part
from tests.distributed.tasks import Language, Sentences
from tests.slow import slow


class LastStepLost(Language):
    """An epoch of four steps of sixteen samples, the last of which not all lanes have; it loses them all."""

    def train_dataset(self) -> Dataset[Any]:
        whole = Sentences(53)
        return [whole[index] if index < 48 else None for index in range(53)]  # type: ignore[return-value]


class Kept(LastStepLost):
    def after_update(self, model: Any, step: Any) -> None:
        super().after_update(model, replace(step, num_samples=8))


class LostQueue(Kept, Queue):
    """Gathers rows, adds totals up, and reports a metric."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return replace(super().loss(outputs, batch), metrics={"size": (batch.numel(), len(batch))})


class LostBatch(Kept, ByBatch):
    pass


class LostRows(Kept, ByRows):
    pass


class LostTwo(LastStepLost, TwoLosses):
    pass


class LostUnknown(LastStepLost, Unknown):
    pass


def configs_of(tasks: Sequence[type[Language]], layout: tuple[str, int]) -> list[RunConfig]:
    def blocks(task: type[Language]) -> FSDPConfig:
        return FSDPConfig(blocks=("Embedding" if issubclass(task, Kept) else "TransformerEncoderLayer",))

    configs = [(task, gappy(task, layout, steps=9)) for task in tasks]
    return [
        replace(config, distributed=replace(config.distributed, fsdp=blocks(task)))
        for task, config in configs
    ]


def go_on(world: World, configs: Sequence[RunConfig], folder: str, last_step: int) -> list[Any]:
    return [
        train_part(world, config, f"{folder}/{number}", last_step) for number, config in enumerate(configs)
    ]


def begin(world: World, configs: Sequence[RunConfig], folder: str) -> list[Any]:
    """Leave checkpoints of before the step that has no samples; return what runs without a stop leave."""
    go_on(world, configs, folder, 3)
    return [train(world, config)[0] for config in configs]


OF_LANES, OF_ALL = (LostQueue, LostTwo, LostUnknown), (LostBatch, LostRows)


@pytest.mark.parametrize(
    ("tasks", "layout"),
    [
        (OF_LANES[::2], ("ddp", 2)),
        *slow(
            (OF_ALL + OF_LANES, ("ddp", 2)),
            (OF_LANES + OF_ALL, ("single", 1)),
            (OF_LANES + OF_ALL, ("fsdp", 3)),
        ),
    ],
)
def test_a_run_goes_on_before_a_step_without_samples(tmp_path, tasks, layout):
    """What the lanes of that step gave, which is nothing, was what those of all later ones had to give."""
    (whole,) = run_distributed(begin, 1, configs_of(tasks, ("single", 1)), str(tmp_path))
    num_processes = layout[1]
    found = run_distributed(go_on, num_processes, configs_of(tasks, layout), str(tmp_path), 9)
    assert found == [whole] * num_processes
