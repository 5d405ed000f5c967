"""An order is chosen by its name, its class or a partial of it, which identify a run alike."""

import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from lanewise import lanes
from lanewise.config import ORDERS, DataConfig, OrderConfig
from lanewise.data import LaneLoader, LaneReader, MixedStream, StreamCut, StreamReader
from lanewise.engine.evaluation.evaluation import build_evaluator
from lanewise.engine.run.build import build_run
from lanewise.engine.samples.dataset import OrderChoice, count_samples, require_apart
from lanewise.errors import ConfigError, DataError, TaskError
from lanewise.processes.world.world import LocalWorld
from tests.distributed.engine.test_own_evaluation import Compared
from tests.distributed.tasks import Smooth, configure
from tests.unit.data.streams import Lengths, LengthsWithState, Numbers, NumbersWithState


@pytest.mark.parametrize("name", ORDERS)
def test_a_name_stands_for_a_class_of_lanes(name):
    order_class = getattr(lanes, f"{name.capitalize()}Order")
    chosen = OrderChoice.of(name)
    assert chosen.make is order_class
    assert chosen.spec == {"class_path": f"lanewise.lanes.{order_class.__name__}", "init_args": {}}
    assert OrderChoice.of(order_class) == chosen
    assert OrderChoice.of(partial(order_class, window=3)).spec == {**chosen.spec, "init_args": {"window": 3}}


def test_every_order_of_lanes_has_a_name():
    classes = {f"lanewise.lanes.{name}" for name in vars(lanes) if name.endswith("Order")}
    assert classes - {"lanewise.lanes.SampleOrder"} == set(ORDERS.values())
    assert f'"""{", ".join(ORDERS)}, or a class' in inspect.getsource(OrderConfig)


class Backwards(lanes.SampleOrder):
    def samples(self, turn):
        return tuple(reversed(turn.positions))


def test_another_class_is_named_by_where_it_is():
    assert OrderChoice.of(Backwards).spec == {"class_path": f"{__name__}.Backwards", "init_args": {}}
    with pytest.raises(
        ConfigError, match=r"order must be one of shuffled, .*, or a SampleOrder: got upwards"
    ):
        OrderChoice.of("upwards")
    with pytest.raises(ConfigError, match=r"got sequentail. Did you mean sequential\?"):
        OrderChoice.of("sequentail")


def test_more_samples_than_python_counts_are_an_error():
    class Endless:
        def __len__(self):
            return 2**64

        def __getitem__(self, index):
            return index

    with pytest.raises(TaskError, match=r"Endless.__len__ must return 2\*\*63 - 1 samples at most"):
        count_samples(Endless())


@pytest.mark.parametrize(("num_samples", "said"), [(30, "14 of 30 samples out"), (32, "")])
def test_what_drop_last_leaves_out_is_said(caplog, num_samples, said):
    """A DataLoader's leaves out less than a micro-batch, and the adapters take its word over."""
    caplog.set_level(logging.INFO)
    config = configure(Compared, num_lanes=8, micro_batch_size=2, num_samples=num_samples)
    build_run(replace(config, data=DataConfig(drop_last=True)), LocalWorld(torch.device("cpu")))
    found = [message for message in caplog.messages if "drop_last" in message]
    assert found == [f"drop_last leaves {said} of each epoch"] * bool(said)


@pytest.mark.parametrize("pins", [True, False])
def test_batches_are_pinned_for_an_accelerator_unless_the_user_says_otherwise(monkeypatch, pins):
    monkeypatch.setattr("lanewise.engine.samples.dataset.has_streams", lambda _: True)
    config = configure(Compared, num_samples=16)
    run = build_run(replace(config, data=DataConfig(pin_memory=pins)), LocalWorld(torch.device("cpu")))
    assert isinstance(run.loader, LaneLoader)
    assert run.loader.pin_memory is pins
    evaluator = build_evaluator(run.config, run.runner, run.training.model, run.world, run.placement)
    assert evaluator is not None
    assert [eval_set.pin_memory for eval_set in evaluator.sets] == [pins]


def numbers(first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + 20))


def check(training: Dataset[Any], evaluated: Dataset[Any]) -> None:
    require_apart(LaneReader(training, list, 0), [LaneReader(evaluated, list, 0, eval_dataset="held_out")])


@pytest.mark.parametrize("other", [numbers(), None])
def test_samples_of_two_splits_that_meet_are_an_error(other):
    data = numbers()
    training = Subset(data, [5, 3, 8, 9])
    with pytest.raises(DataError) as caught:
        check(training, Subset(other or data, torch.tensor([1, 3, 5])))
    assert "2 of 3 samples of the eval dataset held_out are trained on, such as sample 3" in str(caught.value)
    assert "generator=torch.Generator().manual_seed(0)" in str(caught.value)
    with pytest.raises(DataError, match="1 of 2 samples"):
        check(Subset(training, [0, 1]), Subset(Subset(data, range(2, 6)), [0, 1]))


def test_samples_of_one_split_are_apart_and_a_part_of_what_is_trained_on_is_meant():
    data = numbers()
    training, held_out = random_split(data, [15, 5])
    check(training, held_out)
    check(training, Subset(training, [3, 4]))
    check(training, Subset(data, training.indices))
    check(Subset(training, [3, 4]), training)
    check(data, Subset(data, [3, 4]))
    check(Subset(data, [3, 4]), data)
    check(Subset(data, range(20)), Subset(data, [3, 4]))
    many = TensorDataset(torch.arange(100))
    check(Subset(many, range(80)), Subset(many, range(40)))


def test_other_data_may_have_equal_indices():
    check(Subset(numbers(), range(10)), Subset(numbers(100), range(10)))
    check(Subset(numbers(), range(10)), Subset({"a": 1, "b": 2}, ["a"]))


class SplitsTwice(Smooth):
    def train_dataset(self) -> Any:
        return random_split(super().train_dataset(), [0.8, 0.2])[0]

    def eval_datasets(self) -> Any:
        return {"held_out": random_split(super().train_dataset(), [0.8, 0.2])[1]}


def test_a_task_that_splits_twice_is_refused_before_the_first_step():
    with pytest.raises(DataError, match="samples of the eval dataset held_out are trained on"):
        build_run(configure(SplitsTwice, steps=1), LocalWorld(torch.device("cpu")))


class AtItsPosition(IterableDataset[Any]):
    """Keeps its position in itself, without a state."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        self.position = 0
        while self.position < 20:
            self.position += 1
            yield self.position


class AtItsPositionWithState(AtItsPosition):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def check_streams(training: Any, evaluated: Any) -> None:
    cut = StreamCut.of(2, 2, 0)
    readers = [StreamReader(stream, list, 0, cut, range(2)) for stream in (training, evaluated)]
    require_apart(readers[0], readers[1:])


@pytest.mark.parametrize("make", [AtItsPosition, AtItsPositionWithState, lambda: NumbersWithState(20)])
def test_a_stream_that_keeps_its_position_in_itself_is_not_trained_and_evaluated_on(make):
    stream = make()
    check_streams(stream, make())
    for training in (stream, MixedStream([stream, Numbers(9)], [1, 1])):
        with pytest.raises(TaskError, match=r"keeps its position in itself.*make a stream for each"):
            check_streams(training, stream)
    with pytest.raises(TaskError, match="keeps its position"):
        check_streams(MixedStream([stream, stream], [1, 1]), Numbers(9))


@pytest.mark.parametrize("stream", [Numbers(20), Numbers(3), Lengths(9, 4), LengthsWithState(0, 7)])
def test_a_stream_whose_iterators_have_positions_may_be_both(stream):
    check_streams(stream, stream)
