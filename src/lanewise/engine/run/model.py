"""Builds the user's task, its model, and the moving average of the model's weights."""

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lanewise.config import RunConfig
from lanewise.config.class_path import resolve_class
from lanewise.config.classes import build
from lanewise.errors import TaskError
from lanewise.lanes import model_seed
from lanewise.random_state import set_random_state
from lanewise.task import Task


def build_task(config: RunConfig) -> Task:
    """Build the user's task, under the same random state as the model.

    Raises:
        ConfigError: if the class is not a Task.
    """
    resolve_class("task", config.task)  # before seeding: a module may seed a generator when it is imported
    set_random_state(model_seed(config.train.seed))
    task: Task = build("task", config.task)
    return task


def build_model(task: Task, seed: int) -> nn.Module:
    """Build the task's model on the CPU, with the same weights on every rank.

    Raises:
        TaskError: if the task returns something else.
    """
    set_random_state(model_seed(seed))  # so that the weights don't depend on what the task's constructor drew
    model: object = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model must return a torch.nn.Module: got {model!r:.60}. "
            "Return the model."
        )
    return model


def build_average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Copy the model for the moving average of its weights, before hooks are registered on it.

    Args:
        model: the transformed model, before the reducer gets it.
        decay: the decay of the average; None: no average is kept.
    """
    return None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
