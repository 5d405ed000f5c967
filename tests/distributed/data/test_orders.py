"""Every order gives the same samples in the same steps, and the same bytes, on any number of processes."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lanewise.config import DataConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.errors import TaskError
from lanewise.lanes import BucketedOrder, LaneTurn, OrderInputs, SampleOrder
from lanewise.processes.world.world import LocalWorld, World
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, Sentences, configure, train
from tests.unit.engine.own_loop.test_lanes import make_lanes, state_of

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
    """The mistake: lengths that depend on the process."""

    def sample_lengths(self, dataset: Any) -> Sequence[int]:
        return [1 + (number + os.getpid()) % 9 + os.getpid() for number in range(len(dataset))]


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


def train_in_each(world: World) -> list[Any]:
    """Train in each order, into the second epoch, in one world: starting one takes longer."""
    return [train(world, config_for(order, steps=5)) for order in ORDERS]


def test_the_bytes_are_those_of_one_process():
    alone, *_ = run_distributed(train_in_each, 1)
    for results in run_distributed(train_in_each, 3):
        assert [order for order, *two in zip(ORDERS, results, alone, strict=True) if two[0] != two[1]] == []


def test_a_dataset_in_blocks_is_read_blocked_unless_something_else_is_asked_for():
    orders = [
        type(build_engine(config_for(order), LocalWorld(torch.device("cpu"))).run.loader.order).__name__
        for order in (None, "shuffled")
    ]
    assert orders == ["BlockedOrder", "ShuffledOrder"]


def read_from(world: World, first_step: int) -> list[dict[tuple[int, int], tuple[int, ...]]]:
    """Return for each order what this process reads from a step on, by step and lane."""
    loaders = [build_engine(config_for(order), world).run.loader for order in ORDERS]
    return [
        {(one.turn.step, one.turn.lane): one.indices for one in loader.batches(first_step, 9) if one.indices}
        for loader in loaders
    ]


def test_in_the_middle_of_an_epoch_other_processes_go_on():
    (whole,) = run_distributed(read_from, 1, 0)
    for world_size in (1, 3):
        of_ranks = run_distributed(read_from, world_size, 5)
        for number, order in enumerate(ORDERS):
            rest = {place: samples for of_rank in of_ranks for place, samples in of_rank[number].items()}
            assert rest == {place: one for place, one in whole[number].items() if place[0] >= 5}, order


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


OWN_ORDERS = [None, "sequential", "bucketed", "weighted", partial(BucketedOrder, max_tokens=60)]


def own_loops(world: World) -> list[list[dict[str, bytes]]]:
    """Train in a loop of one's own, in each order."""
    lanes = make_lanes(world)
    task = Ordered(NUM_SAMPLES)
    dataset = task.train_dataset()
    lengths, weights = task.sample_lengths(dataset), task.sample_weights(dataset)
    found = []
    for order in OWN_ORDERS:
        torch.manual_seed(0)
        model = lanes.prepare(task.build_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = lanes.steps(
            dataset, collate=task.collate, order=order, sample_lengths=lengths, sample_weights=weights
        )
        for _ in range(2):
            for step in steps:
                for batch in step.batches(model):
                    step.backward(task.loss(model(batch), batch))
                optimizer.step()
        found.append(state_of(model))
    return found


def test_an_own_loop_takes_the_same_orders():
    alone, *_ = run_distributed(own_loops, 1)
    assert len({str(states) for states in alone}) == len(OWN_ORDERS)
    assert run_distributed(own_loops, 3) == [alone] * 3
