"""A lane's batch is a function of its turn: the random state is set for each sample, and to collate."""

import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lanewise.data.reader import LaneReader, map_leaves
from lanewise.lanes import LaneTurn
from lanewise.random_state import set_random_state


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
    return LaneTurn(epoch, step, lane, positions=range(0), num_present_lanes=4, is_last=True)


def read(dataset, indices, *, seed: int = 0, collate=list, **where: int):
    return LaneReader(dataset, collate, seed)[turn(**where), indices].data


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_sample_does_not_depend_on_lane_step_or_what_was_read_before():
    alone = [read(Drawing(), (index,))[0] for index in range(6)]
    assert [sample[0] for sample in alone] == list(range(6))
    assert read(Drawing(), (0, 1, 2, 3, 4, 5)) == alone
    assert read(Drawing(), (5, 3, 1), step=7, lane=2) == [alone[5], alone[3], alone[1]]
    set_random_state(12345)
    assert read(Drawing(), (4, 2), lane=1) == [alone[4], alone[2]]


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}, {"index": 1}])
def test_a_sample_depends_on_seed_epoch_and_index(other):
    def drawn(*, index=0, **where):
        return read(Drawing(), (index,), **where)[0][1:]

    assert all(a != b for a, b in zip(drawn(), drawn(**other), strict=True))


def test_a_step_of_another_epoch_draws_again():
    first, second = (read(Drawing(), (0, 1), epoch=epoch, step=9, lane=1) for epoch in (0, 1))
    assert not {sample[1] for sample in first} & {sample[1] for sample in second}


def drawing_collate(samples):
    return draw()


def test_collate_draws_under_the_state_of_its_lane_and_step():
    drawn = read(Drawing(), (0, 1), step=3, lane=1, collate=drawing_collate)
    assert read(Drawing(), (5,), step=3, lane=1, collate=drawing_collate) == drawn
    others = [{"step": 4, "lane": 1}, {"step": 3, "lane": 2}, {"step": 3, "lane": 1, "seed": 1}]
    for other in others:
        drawn_there = read(Drawing(), (0, 1), collate=drawing_collate, **other)
        assert all(a != b for a, b in zip(drawn, drawn_there, strict=True))


def test_collate_does_not_repeat_what_a_sample_drew():
    collated = read(Drawing(), (0,), collate=lambda samples: (samples[0][1:], draw()))
    assert collated[0] != collated[1]


def test_a_batch_says_whose_it_is():
    one = turn(2, 9, 1)
    batch = LaneReader(Drawing(), len, 0)[one, (4, 2)]
    assert (batch.turn, batch.indices, batch.data) == (one, (4, 2), 2)


def test_samples_are_read_at_once_where_the_dataset_can():
    dataset = DrawingMany()
    samples = read(dataset, (5, 3, 1))
    assert dataset.asked == [[5, 3, 1]]
    assert isinstance(samples, list)
    assert [sample[0] for sample in samples] == [5, 3, 1]


def test_what_is_read_at_once_is_a_function_of_its_turn():
    samples = read(DrawingMany(), (5, 3, 1), epoch=1, step=2, lane=0)
    set_random_state(12345)
    assert read(DrawingMany(), (5, 3, 1), epoch=1, step=3, lane=2) == samples
    assert read(DrawingMany(), (5, 3, 1), epoch=2, step=2, lane=0) != samples
    assert read(DrawingMany(), (5, 3, 1), seed=1, epoch=1, step=2, lane=0) != samples


def test_a_single_sample_is_the_same_read_either_way():
    assert read(DrawingMany(), (4,)) == read(Drawing(), (4,))


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
    """torch's Subset (of random_split) always has __getitems__, which would tie the samples to their turn."""
    subset = Subset(Subset(Drawing(), range(10)), [7, 3, 5])
    alone = [read(subset, (index,))[0] for index in range(3)]
    assert [sample[0] for sample in alone] == [7, 3, 5]
    assert read(subset, (2, 0, 1)) == [alone[2], alone[0], alone[1]]
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
    ],
)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("", "in step 7, lane 3, samples [4, 5]"),
        ("test", "in eval dataset test, lane 3, micro-batch 7, samples [4, 5]"),
    ],
)
def test_an_error_while_a_batch_is_made_says_of_which(dataset, collate, notes, name, place):
    reader = LaneReader(dataset, collate, 0, eval_dataset=name)
    with pytest.raises((OSError, ValueError)) as caught:
        reader[turn(step=7, lane=3), (4, 5)]
    assert caught.value.__notes__ == [note.format(place=place) for note in notes]
