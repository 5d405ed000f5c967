"""Several devices in one process: what they hold, how often weights travel, and whose turn it is."""

import weakref
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise.lanes import Schedule
from lanewise.reduce.reducer import LaneWork
from lanewise.reduce.replicas import ReplicaReducer

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

    def _free(self, key: int, place: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.held[place] -= num_bytes


class Placed(ReplicaReducer):
    """Tells the meter at which place it works; a tensor that is moved is copied, as between GPUs."""

    meter: Meter

    def _forward(self, place: int, lane: LaneWork) -> Any:
        self.meter.place = place
        return super()._forward(place, lane)

    def _loss_on_first(self, lane: LaneWork, *outputs: Any) -> Any:
        self.meter.place = 0
        return super()._loss_on_first(lane, *outputs)


def cross_entropy(outputs: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    targets = torch.zeros(outputs.shape[:2], dtype=torch.long)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("balanced", [False, True])
def test_who_holds_the_outputs_of_a_large_vocabulary(balanced, num_devices):
    """The classic case: the outputs for 40,000 words fill the first GPU under data_parallel."""
    model = nn.Linear(2, VOCABULARY)
    reducer = Placed(model, num_devices, [CPU] * num_devices, exact=False, balanced=balanced)
    data = torch.zeros(NUM_SAMPLES // num_devices, NUM_TOKENS, 2)
    lane = LaneWork(
        data,
        lambda: None,
        lambda replica, batch: replica(batch),
        cross_entropy,
        nullcontext,
        lambda moved, _: moved.clone(),
    )
    with Meter() as meter:
        reducer.meter = meter
        losses = reducer.run([lane] * num_devices)
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
    reducer = ReplicaReducer(model, 4, [CPU, CPU], exact=True, balanced=True)
    other = reducer.replicas[1]
    versions = []
    turns = list(Schedule(12, 4, 1).turns(range(4), 0, 3))
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        lanes = [
            LaneWork(
                torch.ones(3),
                lambda: None,
                lambda replica, batch: replica(batch),
                lambda outputs, _: outputs.sum(),
                nullcontext,
                lambda moved, _: moved,
            )
        ] * 2
        losses = reducer.run(lanes)
        versions.append(other.weight._version)
        assert torch.equal(other.weight, model.weight)
        for turn, loss in zip((first, second), losses, strict=True):
            reducer.backward(turn, reducer.connect(turn, loss))
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
    reducer = ReplicaReducer(model, 2, [CPU, CPU], exact=True, balanced=True)
    order: list[str] = []

    def lane(name: str) -> LaneWork:
        return LaneWork(
            torch.ones(1),
            lambda: order.append(f"seed {name}"),
            lambda replica, _: order.append(f"forward {name}, training {replica.training}"),
            lambda _, __: order.append(f"loss {name}"),
            nullcontext,
            lambda moved, _: moved,
        )

    model.eval()
    reducer.run([lane("a"), lane("b")])
    expected = [f"{what} {name}" for name in "ab" for what in ("seed", "forward", "loss")]
    assert [said.removesuffix(", training False") for said in order] == expected
