"""A lane's batch is a function of its turn, under whose random state it is read and collated."""

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lanewise.data import LaneReader
from lanewise.data.lane_reader import map_leaves
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.random_state import kept_random_state, set_random_state


def draw() -> tuple[float, float, float]:
    """One number from each of the three default generators."""
    return random.random(), float(np.random.random_sample()), torch.rand(()).item()  # noqa: NPY002


class Drawing(Dataset):
    """Each sample is its index and what the generators give; samples draw different amounts."""

    def __getitem__(self, index):
        drawn = draw()
        for _ in range(index % 3):
            draw()
        return index, *drawn


class DrawingMany(Drawing):
    """Remembers what it was asked for at once."""

    def __init__(self):
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(indices)
        return tuple((index, *draw()) for index in indices)


def turn(epoch: int = 0, step: int = 0, lane: int = 0) -> LaneTurn:
    return LaneTurn(epoch, step, lane, positions=range(4), present=range(4), is_last=True)


def read(dataset, indices, *, seed: int = 0, collate=list, name: str = "", **where: int):
    return LaneReader(dataset, collate, seed, eval_dataset=name)[turn(**where), indices].data


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class DrawingBack(Drawing):
    """Puts the state back after it drew, as code does that wants to leave no trace."""

    def __getitem__(self, index):
        with kept_random_state():
            return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [Drawing, DrawingMany, DrawingBack])
def test_a_batch_does_not_depend_on_what_was_read_or_drawn_before(dataset):
    samples = read(dataset(), (5, 3, 1), step=7, lane=2)
    assert [sample[0] for sample in samples] == [5, 3, 1]
    set_random_state(12345)
    read(dataset(), (0, 1), lane=1)
    assert read(dataset(), (5, 3, 1), step=7, lane=2) == samples


@pytest.mark.parametrize("other", [{"epoch": 1}, {"step": 3}, {"lane": 2}, {"seed": 1}, {"name": "test"}])
def test_a_batch_depends_on_its_turn_the_seed_and_the_dataset(other):
    def drawn(**where):
        return read(Drawing(), (0,), **where)[0][1:]

    assert all(a != b for a, b in zip(drawn(), drawn(**other), strict=True))


def test_each_dataset_of_a_loop_is_read_under_random_numbers_of_its_own():
    drawn = []
    for number in ((0, 0), (0, 1), (1, 0)):
        reader = LaneReader(Drawing(), list, 0)
        reader.number = number
        drawn.append(reader[turn(), (0,)].data)
    assert all(values != other for values, other in itertools.combinations(drawn, 2))


def test_a_sample_that_is_in_a_micro_batch_twice_draws_twice():
    """As the order weighted repeats one: it was the same crop each time."""
    first, second = read(Drawing(), (3, 3))
    assert (first[0], second[0]) == (3, 3)
    assert first[1:] != second[1:]


def test_single_reads_depend_on_the_sample_alone():
    """What verify looks at, and what a dataset is known by."""
    reader, other = LaneReader(Drawing(), list, 0), LaneReader(DrawingMany(), list, 0)
    first, second = reader.read(1, (4, 2))
    assert reader.read(1, (2,)) == [second]
    assert list(other.read(1, (4,))) == [first]
    assert reader.read(0, (4,)) != [first]


def test_collate_does_not_repeat_what_a_sample_drew():
    collated = read(Drawing(), (0,), collate=lambda samples: (samples[0][1:], draw()))
    assert collated[0] != collated[1]


def test_a_batch_says_whose_it_is():
    third_turn = turn(2, 9, 1)
    batch = LaneReader(Drawing(), len, 0)[third_turn, (4, 2)]
    assert (batch.turn, batch.indices, batch.data) == (third_turn, (4, 2), 2)


def test_samples_are_read_at_once_where_the_dataset_can():
    dataset = DrawingMany()
    samples = read(dataset, (5, 3, 1))
    assert dataset.asked == [[5, 3, 1]]
    assert isinstance(samples, list)
    assert [sample[0] for sample in samples] == [5, 3, 1]


def test_without_samples_nothing_is_read():
    batch = LaneReader(None, None, 0)[turn(), ()]
    assert (batch.indices, batch.data) == ((), None)


class Threads(Dataset):
    def __getitem__(self, index):
        if index < 0:
            raise IndexError(index)
        return torch.get_num_threads()


@pytest.mark.usefixtures("two_threads")
def test_samples_are_made_with_one_thread():
    data = read(Threads(), (0, 1), collate=lambda samples: [*samples, torch.get_num_threads()])
    assert data == [1, 1, 1]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_threads_come_back_after_a_sample_failed():
    with pytest.raises(IndexError):
        read(Threads(), (-1,))
    assert torch.get_num_threads() == 2


def test_a_subset_reads_one_by_one_unless_what_it_cuts_reads_many():
    """torch's Subset (of random_split) always has __getitems__, where no error could name the sample."""
    subset = Subset(Subset(Drawing(), range(10)), [7, 3, 5])
    assert read(subset, (2, 0, 1)) == read(Drawing(), (5, 7, 3))
    with pytest.raises(OSError, match="torn") as caught:
        read(Subset(Torn(), [7, 3, 5]), (0, 2))
    assert "in sample 2" in caught.value.__notes__
    many = DrawingMany()
    read(Subset(many, [7, 3, 5]), (2, 0))
    assert many.asked == [[5, 7]]


def test_leaves_are_mapped_in_whatever_holds_them():
    """A defaultdict raised once, as its constructor takes a factory first."""
    grouped = defaultdict(list, {"a": torch.ones(1)})
    mapped = map_leaves(lambda tensor: tensor + 1, {"all": (grouped, [torch.zeros(1)], "text")})
    assert mapped["all"][0] == {"a": torch.full((1,), 2.0)}
    assert mapped["all"][0].default_factory is list
    assert mapped["all"][1:] == ([torch.ones(1)], "text")
    assert torch.equal(grouped["a"], torch.ones(1))


class Torn(Dataset):
    """Sample 5 cannot be read."""

    def __getitem__(self, index):
        if index == 5:
            raise OSError("torn")
        return index


class TornTogether(Torn):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def overlook(samples):
    return 1 // samples.index(0)  # ValueError without sample 0


@pytest.mark.parametrize(
    ("dataset", "collate", "notes"),
    [
        (Torn(), list, ["in sample 5", "{place}"]),
        (TornTogether(), list, ["{place}"]),
        (Drawing(), overlook, ["{place}"]),
        (Drawing(), lambda _: None, ["{place}"]),
    ],
)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("", "in step 8, lane 3, samples [4, 5]"),
        ("test", "in eval dataset test, lane 3, micro-batch 8, samples [4, 5]"),
    ],
)
def test_an_error_while_a_batch_is_made_says_of_which(dataset, collate, notes, name, place):
    reader = LaneReader(dataset, collate, 0, eval_dataset=name)
    with pytest.raises((OSError, ValueError, TaskError)) as caught:
        reader[turn(step=7, lane=3), (4, 5)]
    assert caught.value.__notes__ == [note.format(place=place) for note in notes]


def test_samples_read_for_a_turn_without_positions_do_not_count():
    empty_turn = turn()._replace(positions=range(0))
    batch = LaneReader(Drawing(), len, 0)[empty_turn, (4, 2)]
    assert (batch.data, batch.indices, batch.num_samples, batch.has_samples) == (2, (), 0, False)
