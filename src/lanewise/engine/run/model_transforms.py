"""Transforms the user's model before the reducer gets it, by one ordered list of transforms."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from lanewise.config import RunConfig
from lanewise.errors import ConfigError
from lanewise.transforms import checkpoint_activations, compile_forwards, synchronise_batch_norm

Transform: TypeAlias = Callable[[nn.Module, RunConfig, torch.device], nn.Module]
"""Returns the transformed module: the same one, changed or not, or another one that wraps or replaces it."""


def transform(model: nn.Module, config: RunConfig, device: torch.device) -> nn.Module:
    """Apply the transforms to a model.

    Args:
        model: the task's model, on the CPU; equal on all ranks.
        config: the run, which tells each transform whether and how to change the model.
        device: the device to which the model will be moved.

    Raises:
        ConfigError: if a configured transform does not work for this model or on this device.
        TaskError: if the model does not meet the conditions of a transform.
    """
    names = _names(model)
    for one in TRANSFORMS:
        model = one(model, config, device)
        assert _names(model) == names, f"{one.__name__} renamed parameters or buffers"
    return model


def _synchronise_batch_norm(model: nn.Module, config: RunConfig, _device: torch.device) -> nn.Module:
    return synchronise_batch_norm(model) if config.distributed.sync_batch_norm else model


def _compile(model: nn.Module, config: RunConfig, _device: torch.device) -> nn.Module:
    return model if config.compile is None else compile_forwards(model, config.compile)


def _checkpoint_activations(model: nn.Module, config: RunConfig, device: torch.device) -> nn.Module:
    section = config.memory.activation_checkpointing
    if section is None:
        return model
    if section.offload and device.type == "cpu":
        raise ConfigError(
            "memory.activation_checkpointing.offload needs an accelerator: got true on the CPU, where "
            "everything is in host memory. Leave it out."
        )
    return checkpoint_activations(model, section.blocks, offload=section.offload)


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


TRANSFORMS: tuple[Transform, ...] = (_synchronise_batch_norm, _compile, _checkpoint_activations)
"""In this order: a compiled block is checkpointed, so the backward runs the compiled block again. Every
transform keeps the names of parameters and buffers."""
