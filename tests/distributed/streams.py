"""Tasks on streams whose lanes end at different times."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.distributed.reduce.test_reducers import Everything
from tests.distributed.tasks import VOCABULARY, Language
from tests.unit.data.streams import Cursor

LENGTHS = (9, 2, 0, 7, 4, 4, 11, 1)
"""Samples of each lane in an epoch: with micro-batches of two these are six steps."""


def sentence(*place: int) -> torch.Tensor:
    """Return the tokens at a place in a stream."""
    generator = torch.Generator().manual_seed(hash(place) % 2**31)
    length = int(torch.randint(2, 10, (), generator=generator))
    return torch.randint(1, VOCABULARY, (length,), generator=generator)


class Lanes:
    """A lane-aware stream; a word of each sentence is replaced at random, under the lane's random state."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.lengths = lengths

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[torch.Tensor]:
        """Yield the lane's sentences."""
        for number in range(self.lengths[lane]):
            tokens = sentence(epoch, lane, number)
            tokens[int(torch.randint(len(tokens), ()))] = 1
            yield tokens


class LanesWithState(Lanes):
    """A lane-aware stream that can go on anywhere."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Any:
        """Return the lane's sentences."""
        return Cursor([sentence(epoch, lane, number) for number in range(self.lengths[lane])])


class Plain(IterableDataset[torch.Tensor]):
    """A plain stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(90):
            tokens = sentence(number)
            tokens[int(torch.randint(len(tokens), ()))] = 1
            yield tokens


class PlainWithState(IterableDataset[torch.Tensor]):
    """A plain stream whose iterator can go on anywhere."""

    def __iter__(self) -> Any:
        return Cursor([sentence(number) for number in range(90)])


KINDS = {one.__name__: one for one in (Lanes, LanesWithState, Plain, PlainWithState)}


class Streaming(Language):
    """Weighted by tokens, with dropout, BatchNorm, tied and unused parameters; each epoch ends unevenly."""

    def __init__(self, kind: str = "Lanes") -> None:
        super().__init__()
        self.kind = kind

    def build_model(self) -> nn.Module:
        return Everything()

    def train_dataset(self) -> Any:
        return KINDS[self.kind]()
