"""What is done to a user's model before the reducer gets it: one list, so that there is one order."""

from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from lanewise.config import RunConfig

Transform: TypeAlias = Callable[[nn.Module, RunConfig], nn.Module]
"""Returns the module to go on with: the same one, changed or not, or another one around or in place of it."""

TRANSFORMS: tuple[Transform, ...] = ()
"""The first is the innermost; a file each. All keep the names of parameters and buffers."""


def transform(model: nn.Module, config: RunConfig) -> nn.Module:
    """Apply the list to a model on the CPU, that every rank built alike."""
    names = _names(model)
    for one in TRANSFORMS:
        model = one(model, config)
        assert _names(model) == names, f"{one.__name__} renamed parameters or buffers"
    return model


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
