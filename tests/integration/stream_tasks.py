"""Tasks on streams that are killed, that raise, that never yield."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from lanewise import Task

LENGTHS = (13, 4, 0, 9)
"""Samples of the lanes in an epoch: in micro-batches of two, seven steps."""


def sample(*place: int) -> torch.Tensor:
    return torch.tensor([float(number + 1) for number in place]) / 10


class Cursor:
    """An iterator with a state."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.position = samples, 0

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> Any:
        if self.position == len(self.samples):
            raise StopIteration
        self.position += 1
        return self.samples[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Lanes:
    """A lane-aware stream, with random numbers that are drawn as it is read."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        for number in range(LENGTHS[lane]):
            yield torch.cat([sample(epoch, lane, number), torch.rand(1)])


class LanesWithState:
    """A lane-aware stream that goes on anywhere."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Any:
        return Cursor([sample(epoch, lane, number, 0) for number in range(LENGTHS[lane])])


class Plain(IterableDataset[Any]):
    """A plain stream of 51 samples, seven steps."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(51):
            yield torch.cat([sample(number, 1, 2), torch.rand(1)])


class PlainWithState(IterableDataset[Any]):
    """The same, and goes on anywhere."""

    def __iter__(self) -> Any:
        return Cursor([sample(number, 1, 2, 3) for number in range(51)])


KINDS = {one.__name__: one for one in (Lanes, LanesWithState, Plain, PlainWithState)}


class Streaming(Task):
    """Learns a line; every part of its state matters."""

    def __init__(self, kind: str, fault: str = "", sleep_seconds: float = 0.0) -> None:
        self.kind, self.fault, self.sleep_seconds = kind, fault, sleep_seconds

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def train_dataset(self) -> Any:
        return Faulty(KINDS[self.kind](), self.fault) if self.fault else KINDS[self.kind]()

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleep_seconds)
        return model(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs[:, 0], batch.sum(1))


class Faulty:
    """A stream in whose lane 3 something happens after five samples.

    The fault is `raise`, `never` (yields), `die`, or a path: where that is a file, the lane ends there.
    """

    def __init__(self, stream: Any, fault: str) -> None:
        self.stream, self.fault = stream, fault

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        for number, one in enumerate(self.stream.iter_lane(epoch, lane, num_lanes)):
            if (lane, number) == (3, 5):
                if self.fault == "raise":
                    raise OSError("the connection was lost")
                if self.fault == "never":
                    time.sleep(1000)
                if self.fault == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if Path(self.fault).exists():
                    return
            yield one
