"""The optimizer of a run."""

import dataclasses

import pytest
import torch
from torch import nn

from lanewise.config import OptimizerConfig
from lanewise.engine.run.model import build_model, build_task
from lanewise.engine.run.optimizer import build_optimizer
from lanewise.errors import ConfigError, TaskError
from tests.distributed.tasks import Smooth, configure


def test_a_value_that_torch_refuses_names_the_section():
    section = OptimizerConfig(class_path="torch.optim.Adam", init_args={"lr": -1.0})
    config = dataclasses.replace(configure(Smooth), optimizer=section)
    task = build_task(config)
    said = r"optimizer: torch\.optim\.Adam refuses its arguments: Invalid learning rate: -1\.0\."
    with pytest.raises(ConfigError, match=said):
        build_optimizer(config, task, build_model(task, 0))


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
