"""Several devices in one process: what they hold, how often weights travel, and whose turn it is."""

import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise.data import LaneBatch
from lanewise.lanes import LaneTurn, Schedule
from lanewise.reduce.replicas import ReplicaReducer, _in_context

CPU = torch.device("cpu")
VOCABULARY, NUM_TOKENS, NUM_SAMPLES = 40_000, 25, 32


class Meter(TorchDispatchMode):
    """Counts the bytes that are held by large tensors, at the place where they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0
        self.held: Counter[int] = Counter()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() > 2**20:
            storage = result.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known.add(key)
                self.held[self.place] += storage.nbytes()
                weakref.finalize(storage, self._free, key, self.place, storage.nbytes())
        return result

    def follow(self, reducer: ReplicaReducer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Learn at which place a reducer works; a tensor that is moved is copied, as between GPUs."""
        forward, loss_on_first = reducer._forward, reducer._loss_on_first

        def place_forward(place: int, lane: Any) -> Any:
            self.place = place
            return forward(place, lane)

        def place_loss(*arguments: Any) -> Any:
            self.place = 0
            return loss_on_first(*arguments)

        monkeypatch.setattr(reducer, "_forward", place_forward)
        monkeypatch.setattr(reducer, "_loss_on_first", place_loss)
        monkeypatch.setattr("lanewise.reduce.replicas.move", lambda data, _device: data.clone())

    def _free(self, key: int, place: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.held[place] -= num_bytes


@dataclass(frozen=True)
class Work:
    """A lane that notes what is done with it, and tells the meter at which place it is done."""

    data: torch.Tensor
    turn: LaneTurn = field(default_factory=lambda: LaneTurn(0, 0, 0, range(1), range(1), is_last=True))
    loss_function: Callable[[Any, Any], torch.Tensor] = lambda outputs, _data: outputs.sum()
    note: Callable[[str], object] = lambda _what: None

    @property
    def batch(self) -> LaneBatch:
        return LaneBatch(self.turn, (0,), self.data, 1)

    def forward(self, model: nn.Module, data: torch.Tensor) -> Any:
        self.note(f"forward, training {model.training}")
        return model(data)

    def loss(self, outputs: Any, data: torch.Tensor) -> torch.Tensor:
        self.note("loss")
        return self.loss_function(outputs, data)


def cross_entropy(outputs: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    targets = torch.zeros(outputs.shape[:2], dtype=torch.long)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("balanced", [False, True])
def test_who_holds_the_outputs_of_a_large_vocabulary(balanced, num_devices, monkeypatch):
    """The classic case: the outputs for 40,000 words fill the first GPU under data_parallel."""
    model = nn.Linear(2, VOCABULARY)
    reducer = ReplicaReducer(model, num_devices, [CPU] * num_devices, "close", balanced=balanced)
    meter = Meter()
    meter.follow(reducer, monkeypatch)
    data = torch.zeros(NUM_SAMPLES // num_devices, NUM_TOKENS, 2)
    lanes = [Work(data, loss_function=cross_entropy)] * num_devices
    with meter:
        losses = reducer.run(lanes)
        held = [meter.held[place] for place in range(num_devices)]
    # What the backward needs of the outputs is as large as they are: the logarithm of the softmax.
    of_a_lane = NUM_SAMPLES // num_devices * NUM_TOKENS * VOCABULARY * 4
    if balanced:
        assert held == [of_a_lane] * num_devices
    else:
        assert held == [num_devices * of_a_lane] + [0] * (num_devices - 1)
    assert len(losses) == num_devices


def test_weights_travel_once_a_step():
    model = nn.Linear(3, 1)
    reducer = ReplicaReducer(model, 4, [CPU, CPU], "exact", balanced=True)
    other = reducer.replicas[1]
    versions = []
    turns = list(Schedule(12, 4, 1).turns(range(4), 0, 3))
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        losses = reducer.run([Work(torch.ones(3))] * 2)
        versions.append(other.weight._version)
        assert torch.equal(other.weight, model.weight)
        for turn, loss in zip((first, second), losses, strict=True):
            reducer.backward(turn, loss, None)
        if second.is_last:
            reducer.finish(4.0)
            assert torch.equal(model.weight.grad, torch.ones(1, 3))
            assert other.weight.grad is None
            with torch.no_grad():
                model.weight.add_(1)
            model.zero_grad()
    assert [after - before for before, after in pairwise(versions)] == [0, 1, 0, 1, 0]


def test_lanes_take_turns_on_the_cpu_and_replicas_follow_the_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    reducer = ReplicaReducer(model, 2, [CPU, CPU], "exact", balanced=True)
    order: list[str] = []

    lanes = [
        Work(torch.ones(2), note=lambda what, name=name: order.append(f"{what} {name}")) for name in "ab"
    ]
    model.eval()
    reducer.run(lanes)
    assert order == ["forward, training False a", "loss a", "forward, training False b", "loss b"]


def test_threads_of_replicas_have_the_context_variables_of_the_step():
    """Without them a lane in a thread would not know where in the run it is."""
    where = ContextVar("where", default=0)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: where.get(), range(2))) == [0, 0]
        where.set(3)
        assert list(threads.map(_in_context(lambda number: where.get() + number), range(2))) == [3, 4]
