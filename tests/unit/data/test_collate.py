"""A micro-batch is what collate returns; and the collate of those who say nothing else."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lanewise.data.collate import collate, no_batch
from lanewise.errors import TaskError


class Table(list):
    """Has columns already."""

    columns = {"x": torch.arange(2)}  # noqa: RUF012 - a test's


class Frame(list):
    """Has columns that are something else."""

    columns = ("x",)


def test_samples_are_stacked_as_torch_does():
    batch = collate([{"x": 1.5, "y": (torch.zeros(2), 3)}] * 2)
    assert batch["x"].tolist() == [1.5, 1.5]
    assert batch["y"][0].shape == (2, 2)


def test_columns_are_taken_as_they_are():
    table = Table([{"x": 0}, {"x": 1}])
    batch = collate(table)
    assert type(batch) is dict
    assert batch["x"] is table.columns["x"]


def test_only_a_mapping_counts_as_columns():
    assert collate(Frame([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([torch.ones(2), torch.ones(3)], "stack expects each tensor to be equal size"),
        ([[1, 2], [3]], "each element in list of batch should be of equal size"),
        ([{"x": object()}], "default_collate: batch must contain tensors"),
    ],
)
def test_samples_that_cannot_be_stacked_need_a_collate(samples, text):
    with pytest.raises(TaskError, match=f"samples cannot be stacked .*{text}.* Give the task, .*, a collate"):
        collate(samples)


def test_a_list_of_datasets_is_joined():
    with pytest.raises(TaskError, match="They are datasets: join these by torch"):
        collate([TensorDataset(torch.ones(2))])


def test_any_other_error_is_torchs():
    with pytest.raises(IndexError):
        collate([])


class Forgetful:
    def collate(self, samples):
        collate(samples)


def test_the_error_about_a_collate_that_returns_nothing_names_it():
    with pytest.raises(TaskError, match=r"^Forgetful.collate must return a micro-batch: got None"):
        raise no_batch(Forgetful().collate)
