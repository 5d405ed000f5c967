"""The optimizer and the scheduler of a run."""

import dataclasses

import pytest
import torch
from torch import nn

from lanewise.config import ClassConfig
from lanewise.engine import build_model, build_task
from lanewise.engine.optimizer import build_optimizer
from lanewise.errors import ConfigError, TaskError
from tests.distributed.tasks import Smooth, configure

ONE_CYCLE = ClassConfig(
    class_path="torch.optim.lr_scheduler.OneCycleLR", init_args={"max_lr": 0.1, "total_steps": -1}
)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"optimizer": ClassConfig(class_path="torch.optim.Adam", init_args={"lr": -1.0})},
            "optimizer: torch.optim.Adam refuses its arguments: Invalid learning rate: -1.0.",
        ),
        (
            {"scheduler": ONE_CYCLE},
            "OneCycleLR refuses its arguments: Expected positive integer total_steps, but got -1.",
        ),
    ],
)
def test_a_value_that_a_class_refuses_names_the_section(sections, said):
    config = dataclasses.replace(configure(Smooth), **sections)
    task = build_task(config)
    with pytest.raises(ConfigError) as caught:
        build_optimizer(config, task, build_model(task, 0))
    assert said in str(caught.value)


class Outside(Smooth):
    """Trains a temperature that is no part of its model."""

    def parameter_groups(self, model):
        return [*model.parameters(), nn.Parameter(torch.ones(3))]


def test_a_parameter_outside_of_the_model_is_an_error():
    """Each process trained its own, and the first checkpoint could not be saved."""
    config = configure(Outside)
    task = build_task(config)
    with pytest.raises(TaskError, match=r"of shape \(3,\), is not in the model"):
        build_optimizer(config, task, build_model(task, 0))
