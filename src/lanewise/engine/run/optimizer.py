"""Builds the optimizer over the parameters of a model."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lanewise.config import ClassConfig, RunConfig
from lanewise.config.classes import build
from lanewise.config.optimizer import choose_implementation
from lanewise.config.scheduler import length_hint
from lanewise.errors import ConfigError, TaskError
from lanewise.task import Task


def build_optimizer(config: RunConfig, task: Task, model: nn.Module) -> Optimizer:
    """Build the optimizer over the task's parameter groups.

    Raises:
        ConfigError: if the class is not an optimizer, or cannot be used for training here.
        TaskError: if a parameter of the optimizer is not in the model.
    """
    device_types = {parameter.device.type for parameter in model.parameters()}
    are_floats = all(parameter.is_floating_point() for parameter in model.parameters())
    section = choose_implementation(config, device_types, are_floats=are_floats)
    optimizer: Optimizer = build_section("optimizer", section, task.parameter_groups(model))
    parameters = set(model.parameters())
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if parameter not in parameters:
            raise TaskError(
                f"a parameter of the optimizer, of shape {tuple(parameter.shape)}, is not in the model: "
                "its gradient would not be summed over the lanes, and it would not be saved. Make it part of "
                "the module that build_model returns."
            )
    return optimizer


def build_section(key: str, section: ClassConfig, argument: object) -> Any:
    """Build an object of a torch class; an error about a refused value, such as lr=-1, names the section.

    Raises:
        ConfigError: if the class is not of the type that the section needs, or refuses a value.
    """
    try:
        return build(key, section, argument)
    except ConfigError:
        raise
    except ValueError as error:
        hint = length_hint(str(error)) if key == "scheduler" else ""
        said = str(error).removesuffix(".")
        raise ConfigError(f"{key}: {section.class_path} refuses its arguments: {said}.{hint}") from error
