"""What is done to a user's model before the reducer gets it: one list, so that there is one order."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from lanewise.config import RunConfig
from lanewise.errors import ConfigError
from lanewise.transforms import checkpoint_activations, compile_forwards, synchronise_batch_norm

Transform: TypeAlias = Callable[[nn.Module, RunConfig, torch.device], nn.Module]
"""Returns the module to go on with: the same one, changed or not, or another one around or in place of it."""


def transform(model: nn.Module, config: RunConfig, device: torch.device) -> nn.Module:
    """Apply the list to a model on the CPU, that every rank built alike.

    Args:
        model: as the task built it.
        config: says what is done to it.
        device: where the model will be.

    Raises:
        ConfigError: if what the configuration says cannot be done to this model, or on this device.
        TaskError: if the model does not fit it.
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
"""The first is the innermost: a compiled block is what runs again. All keep the names of the state."""
