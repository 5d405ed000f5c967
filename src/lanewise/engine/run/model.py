"""Builds the user's task and its model, and transforms it."""

import copy
import logging

import torch
from torch import nn

from lanewise.config import RunConfig
from lanewise.config.check import nearest
from lanewise.config.class_path import resolve_class
from lanewise.config.classes import build
from lanewise.engine.transforms import checkpoint_activations, compile_forwards, synchronise_batch_norm
from lanewise.errors import ConfigError, TaskError
from lanewise.lanes import model_seed
from lanewise.processes.device.random_state import set_random_state
from lanewise.reduce import require_plain
from lanewise.task import Task

logger = logging.getLogger(__name__)

_NEAR = 0.8
"""So much of two names must be alike that one may be meant by the other."""


def build_task(config: RunConfig, given: Task | None = None) -> Task:
    """Build the user's task, under the same random state as the model; of one that was given, a copy.

    Raises:
        ConfigError: if the class is not a Task.
    """
    if given is not None:
        return copy.deepcopy(given)
    resolve_class("task", config.task)  # before seeding: a module may seed a generator when it is imported
    set_random_state(model_seed(config.train.seed))
    task: Task = build("task", config.task)
    return task


def warn_of_misspelt(task: Task) -> None:
    """Warn of methods of a task that nobody calls, since they are named nearly as a method of `Task` is.

    One that the class has besides the method itself is its own affair.
    """
    cls = type(task)
    known = [name for name in dir(Task) if not name.startswith("_")]
    own = {name for name in known if getattr(cls, name) is not getattr(Task, name)}
    for name in (name for name in dir(cls) if not name.startswith("_") and name not in known):
        near = nearest(name, known, cutoff=_NEAR) if callable(getattr(cls, name)) else None
        if near and near not in own:
            logger.warning("%s.%s is not used: did you mean %s?", cls.__name__, name, near)


def build_model(task: Task, seed: int) -> nn.Module:
    """Build the task's model on the CPU, with the same weights on every rank.

    Raises:
        TaskError: if the task returns something else, or a model that is distributed already.
    """
    set_random_state(model_seed(seed))  # so that the weights don't depend on what the task's constructor drew
    model: object = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model must return a torch.nn.Module: got {model!r:.60}. "
            "Return the model."
        )
    require_plain(model)  # a copy of it, for an average, would fail with an error of torch
    if compiled := next((name for name, _ in model.named_parameters() if "_orig_mod." in name), ""):
        raise TaskError(
            f"{type(task).__name__}.build_model compiled a module, whose weights every file would then have "
            f"as {compiled}. Return the plain one and set compile, or call its compile(), which keeps names."
        )
    return model


def transform(model: nn.Module, config: RunConfig, device: torch.device) -> nn.Module:
    """Apply the transforms that a run asks for to a model. Each keeps the names of parameters and buffers.

    Args:
        model: the task's model, on the CPU; equal on all ranks.
        config: the run, which tells whether and how to change the model.
        device: the device to which the model will be moved.

    Raises:
        ConfigError: if a configured transform does not work for this model or on this device.
        TaskError: if the model does not meet the conditions of a transform.
    """
    names = _names(model)
    if config.distributed.sync_batch_norm:
        model = synchronise_batch_norm(model)
    if config.compile is not None:
        model = compile_forwards(model, config.compile)
    # After compile: a compiled block is checkpointed, so the backward runs the compiled block again.
    if (section := config.memory.activation_checkpointing) is not None:
        if section.offload and device.type == "cpu":
            raise ConfigError(
                "memory.activation_checkpointing.offload needs an accelerator: got true on the CPU, where "
                "everything is in host memory. Leave it out."
            )
        model = checkpoint_activations(model, section.blocks, offload=section.offload)
    assert _names(model) == names, "a transform renamed parameters or buffers"
    return model


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
