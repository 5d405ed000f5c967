"""Equal datasets have equal fingerprints, most others don't."""

from collections import OrderedDict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lanewise.data import Fingerprint, LaneReader
from lanewise.data.fingerprint import fingerprint
from lanewise.errors import TaskError
from lanewise.processes.device.random_state import set_random_state


class Recording(Dataset):
    """The given samples; remembers which were read."""

    def __init__(self, samples):
        self.samples = samples
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return self.samples[index]


def of(samples, *, seed: int = 0) -> Fingerprint:
    return fingerprint(LaneReader(Recording(samples), list, seed), len(samples))


class Point(NamedTuple):
    x: Any
    y: Any


SAMPLES = [
    torch.arange(6.0),
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).double(),
    torch.arange(6),
    torch.arange(6.0).bfloat16(),
    torch.arange(6) > 2,
    torch.tensor(1.0),
    torch.tensor([1.0]),
    torch.empty(0),
    torch.empty(0, 3),
    np.arange(6, dtype=np.float32),
    np.arange(6, dtype=np.float64),
    np.arange(6).reshape(2, 3),
    np.float32(1),
    np.float64(1),
    np.array(["a", "b"]),
    1,
    1.0,
    True,
    0j,
    "1",
    b"1",
    "",
    [],
    [1],
    [[1]],
    [1, 2],
    [[1], 2],
    [[1, 2]],
    ["12"],
    ["1", "2"],
    {"image": 1},
    {"image": 2},
    {"label": 1},
    {"image": {"label": 1}},
    {"image": [torch.zeros(2), {"label": np.int64(3)}]},
    {"image": [torch.zeros(2), {"label": np.int64(4)}]},
    (torch.zeros(2), 1),
    (torch.zeros(2), 2),
    object(),
]


def test_different_samples_differ():
    digests = [of([sample]).samples_digest for sample in SAMPLES]
    assert len(set(digests)) == len(SAMPLES)


@pytest.mark.parametrize(
    ("sample", "equal"),
    [
        (torch.arange(6.0), torch.arange(12.0)[:6].clone()),
        (torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).T.contiguous().T),
        (torch.ones(3), torch.ones(1).expand(3)),
        (torch.ones(3), torch.ones(3, requires_grad=True)),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        ({"a": 1, "b": [2]}, OrderedDict(a=1, b=[2])),
        ({"a": 1, "b": [2]}, MappingProxyType({"a": 1, "b": [2]})),
        ((1, 2), [1, 2]),
        ((1, 2), Point(1, 2)),
        ("text", "".join(list("text"))),
        (float("nan"), float("nan")),
    ],
)
def test_equal_samples_are_equal(sample, equal):
    assert of([sample]) == of([equal])


class Graph:
    """Like the batches of graph libraries: an object with tensors, which refers to itself."""

    def __init__(self, value):
        self.nodes = torch.full((2,), value)
        self.itself = self


def test_of_unknown_objects_the_type_and_the_attributes_count():
    """Two graphs were equal once whatever they held, so that every tensor was `same`."""
    assert of([object()]) == of([object()])
    assert of([{1, 2}]) != of([frozenset({1, 2})])
    assert of([np.array([1, "a"], dtype=object)]) != of([np.array([2, "b"], dtype=object)])
    assert of([(object(), 1)]) != of([(object(), 2)])
    assert of([Graph(1.0)]) == of([Graph(1.0)]) != of([Graph(2.0)])
    assert of([memoryview(b"image")]) == of([memoryview(b"image")]) != of([memoryview(b"other")])


def test_the_length_counts():
    assert of([7] * 4).num_samples == 4
    assert of([7] * 4) != of([7] * 5)
    assert of([7] * 4).samples_digest == of([7] * 5).samples_digest


@pytest.mark.parametrize(("num_samples", "read"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (100, [0, 50, 99])])
def test_the_first_the_middle_and_the_last_sample_are_read(num_samples, read):
    dataset = Recording(list(range(num_samples)))
    fingerprint(LaneReader(dataset, list, 0), num_samples)
    assert dataset.read == read


@pytest.mark.parametrize("index", [0, 50, 99])
def test_one_other_sample_is_noticed(index):
    samples = list(range(100))
    samples[index] = -1
    assert of(samples) != of(range(100))


class Augmenting(Dataset):
    def __getitem__(self, index):
        return torch.rand(3), np.random.random_sample()  # noqa: NPY002


def test_random_samples_are_drawn_under_their_own_state():
    def of_seed(seed):
        return fingerprint(LaneReader(Augmenting(), list, seed), 10)

    set_random_state(1)
    first = of_seed(0)
    set_random_state(2)
    torch.rand(1)
    assert of_seed(0) == first
    assert of_seed(1) != first


class ReadAtOnce(Dataset):
    def __getitems__(self, indices):
        return [index * 10 for index in indices]


def test_a_dataset_that_reads_many_at_once():
    assert fingerprint(LaneReader(ReadAtOnce(), list, 0), 100) == of(range(0, 1000, 10))


def test_a_process_that_iterates_over_a_set_in_another_order_finds_the_same():
    """As another process does with a set of texts, whose hashes it draws."""
    one, other = set([0, 8]), set([8, 0])  # noqa: C405 - a display of constants would be sorted
    assert [*one] != [*other]
    assert of([{"a": "text", "b": one, "c": object()}]) == of([{"a": "text", "b": other, "c": object()}])


@pytest.mark.parametrize(
    "view", [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j, 3 - 4j]).conj().imag]
)
def test_a_view_that_only_says_conjugate_or_negative(view):
    assert view.is_conj() or view.is_neg()
    assert of([view]) == of([view.clone().resolve_conj().resolve_neg()])
    assert of([view]) != of([view.resolve_conj().resolve_neg() + 1])


def test_a_sparse_tensor_counts_by_its_elements():
    assert of([torch.eye(2).to_sparse()]) == of([torch.eye(2).to_sparse()])
    assert of([torch.eye(2).to_sparse()]) != of([2 * torch.eye(2).to_sparse()])


class ByKey(dict):
    """As a DatasetDict of Hugging Face."""

    def __getitem__(self, key):
        if not isinstance(key, str):
            raise KeyError("select a split")
        return super().__getitem__(key)


class WithoutItems(Dataset):
    """Is not read by index."""


class Failing(Dataset):
    def __getitem__(self, index):
        return {}["column"]


@pytest.mark.parametrize("dataset", [{"train": [1], "test": [2]}, ByKey(train=[1]), WithoutItems()])
def test_what_is_not_read_by_index_is_one_clear_error(dataset):
    said = (
        rf"the training dataset is a {type(dataset).__name__}, which has no sample 0: .*__getitem__\(index\)"
    )
    with pytest.raises(TaskError, match=said):
        fingerprint(LaneReader(dataset, list, 0), 2)


def test_a_key_that_a_sample_lacks_is_an_error_of_the_user():
    with pytest.raises(KeyError, match="column"):
        fingerprint(LaneReader(Failing(), list, 0), 2)
