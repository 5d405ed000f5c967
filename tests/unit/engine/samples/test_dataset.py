"""An order is chosen by its name, its class or a partial of it, which identify a run alike."""

import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch

from lanewise import lanes
from lanewise.config import ORDERS, DataConfig, OrderConfig
from lanewise.data.loader import LaneLoader
from lanewise.engine.evaluation.evaluation import build_evaluator
from lanewise.engine.run.build import build_run
from lanewise.engine.samples.dataset import OrderChoice, count_samples
from lanewise.errors import ConfigError, TaskError
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import configure
from tests.distributed.test_own_evaluation import Compared


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


@pytest.mark.parametrize("pins", [True, False])
def test_batches_are_pinned_for_an_accelerator_unless_the_user_says_otherwise(monkeypatch, pins):
    monkeypatch.setattr("lanewise.engine.samples.dataset.has_streams", lambda _: True)
    config = configure(Compared, num_samples=16)
    run = build_run(replace(config, data=DataConfig(pin_memory=pins)), LocalWorld(torch.device("cpu")))
    assert isinstance(run.loader, LaneLoader)
    assert run.loader.pin_memory is pins
    evaluator = build_evaluator(run.config, run.training.runner, run.training.model, run.world, run.placement)
    assert evaluator is not None
    assert [eval_set.pin_memory for eval_set in evaluator.sets] == [pins]
