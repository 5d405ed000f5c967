"""An own loop evaluates each sample that is there once, and says so where there is none."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchmetrics import SumMetric

from lanewise.errors import DataError
from lanewise.processes.world.world import LocalWorld
from tests.unit.engine.own_loop.test_lanes import make_lanes


class Numbers(Dataset[Any]):
    """The numbers from 0 to 9; None from some number on."""

    def __init__(self, end: int) -> None:
        self.end = end

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return float(index) if index < self.end else None


def total(end: int) -> float:
    metric = SumMetric()
    lanes = make_lanes(LocalWorld(torch.device("cpu")), global_batch_size=4)
    for numbers in lanes.evaluate(Numbers(end), metric, missing="skip"):
        metric.update(numbers)
    return metric.compute().item()


def test_samples_that_are_none_are_left_out():
    assert total(10) == 45
    assert total(3) == 3  # and a lane has none


def test_a_dataset_of_nothing_else_is_an_error():
    with pytest.raises(DataError, match=r"the eval dataset Numbers gave no sample.* and not None for each"):
        total(0)
