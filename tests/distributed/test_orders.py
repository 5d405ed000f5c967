"""Every order gives the same samples in the same steps, and the same bytes, on any number of processes."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lanewise.config import DataConfig, RunConfig
from lanewise.engine import build_engine
from lanewise.errors import TaskError
from lanewise.lanes import BucketedOrder, LaneTurn, OrderInputs, SampleOrder
from lanewise.testing import run_distributed
from lanewise.world.world import LocalWorld, World
from tests.distributed.tasks import Language, Sentences, configure, train
from tests.unit.engine.test_own_loop import make_lanes, state_of

NUM_SAMPLES = 53


class Blocks(Sentences):
    """Sentences in blocks."""

    def block_sizes(self) -> list[int]:
        return [7, 0, 19, 1, 26]


class Ordered(Language):
    """Knows whatever an order may ask for."""

    def train_dataset(self) -> Dataset[Any]:
        return Blocks(self.num_samples)

    def sample_lengths(self, dataset: Any) -> Sequence[int]:
        return [len(dataset[index]) for index in range(len(dataset))]

    def sample_weights(self, dataset: Any) -> Sequence[float]:
        return np.linspace(0.1, 1, len(dataset))


class Unlike(Ordered):
    """The mistake: lengths that each process draws for itself."""

    def sample_lengths(self, dataset: Any) -> Sequence[int]:
        return [
            int(torch.empty((), dtype=torch.int64).random_()) % 9 + id(self) % 7 for _ in range(len(dataset))
        ]


class Backwards(SampleOrder):
    """An order of a user's."""

    def __init__(self, inputs: OrderInputs, first: int) -> None:
        super().__init__(inputs)
        self._first = first

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        return tuple((self._first - position) % NUM_SAMPLES for position in turn.positions)


ORDERS: list[Any] = [
    "sequential",
    "shuffled",
    "blocked",
    {"class_path": "blocked", "init_args": {"window": 4}},
    {"class_path": "bucketed", "init_args": {"window_steps": 2}},
    {"class_path": "bucketed", "init_args": {"max_tokens": 60}},
    "weighted",
    {"class_path": "weighted", "init_args": {"replacement": False, "num_samples": 37}},
    {"class_path": f"{__name__}.Backwards", "init_args": {"first": 5}},
]


def config_for(order: Any, task: type[Language] = Ordered, **options: Any) -> RunConfig:
    config = configure(task, num_samples=NUM_SAMPLES, **options)
    return replace(config, data=DataConfig(order=order))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_bytes_are_those_of_one_process(order):
    config = config_for(order)
    alone, *_ = run_distributed(train, 1, config)
    assert run_distributed(train, 3, config) == [alone] * 3


def test_a_dataset_in_blocks_is_read_blocked_unless_something_else_is_asked_for():
    orders = [
        type(build_engine(config_for(order), LocalWorld(torch.device("cpu"))).loader.order).__name__
        for order in (None, "shuffled")
    ]
    assert orders == ["BlockedOrder", "ShuffledOrder"]


def go_on(world: World, config: RunConfig, first_step: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return what this process reads from a step on."""
    loader = build_engine(config, world).loader
    return [(one.turn.step, one.turn.lane, one.indices) for one in loader.batches(first_step, 9)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_in_the_middle_of_an_epoch_other_processes_go_on(order):
    config = config_for(order)
    (whole,) = run_distributed(go_on, 1, config, 0)
    for world_size in (1, 3):
        rest = itertools.chain.from_iterable(run_distributed(go_on, world_size, config, 5))
        assert sorted(one for one in rest if one[2]) == sorted(one for one in whole if one[0] >= 5 and one[2])


def test_lengths_that_differ_between_the_processes_are_told():
    with pytest.raises(
        RuntimeError, match=r"see different datasets: .* of three samples and of sample_lengths"
    ):
        run_distributed(train, 2, config_for("bucketed", Unlike))


@pytest.mark.parametrize(
    ("order", "method"), [("bucketed", "sample_lengths"), ("weighted", "sample_weights")]
)
def test_a_task_that_lacks_what_its_order_needs_is_told_what_to_add(order, method):
    with pytest.raises(
        TaskError, match=f"data.order is {order}, and Language has no {method}. Give Language"
    ):
        build_engine(config_for(order, Language), LocalWorld(torch.device("cpu")))


def own_loop(world: World, order: Any) -> list[dict[str, bytes]]:
    """Do what `train` does with an order in a loop of one's own."""
    lanes = make_lanes(world)
    task = Ordered(NUM_SAMPLES)
    torch.manual_seed(0)
    model = lanes.prepare(task.build_model())
    dataset = task.train_dataset()
    lengths, weights = task.sample_lengths(dataset), task.sample_weights(dataset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = lanes.steps(
        dataset, collate=task.collate, order=order, sample_lengths=lengths, sample_weights=weights
    )
    for _ in range(2):
        for step in steps:
            for batch in step:
                step.backward(task.loss(model(batch), batch))
            optimizer.step()
    return state_of(model)


@pytest.mark.parametrize(
    "order", [None, "sequential", "bucketed", "weighted", partial(BucketedOrder, max_tokens=60)]
)
def test_an_own_loop_takes_the_same_orders(order):
    alone, *_ = run_distributed(own_loop, 1, order)
    assert run_distributed(own_loop, 3, order) == [alone] * 3
