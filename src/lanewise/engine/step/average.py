"""The exponential moving average of a model's weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lanewise.errors import ConfigError
from lanewise.reduce.replicas import detach_computed
from lanewise.runs.checkpoint.model_file import grow_buffers


def build_average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Return the average of a model that is on the CPU and has no hooks yet; None without a decay.

    Raises:
        ConfigError: if the decay is not between 0 and 1.
    """
    if decay is not None and not 0 < decay < 1:
        raise ConfigError(f"ema_decay must be greater than 0 and less than 1: got {decay!r}.")
    detach_computed(model)
    return None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def update_average(average: AveragedModel, model: nn.Module) -> None:
    """Add a model after an update.

    What somebody makes of a frozen parameter, such as a teacher, is no path of updates: it stays as it is.
    """
    grow_buffers(average.module, dict(model.named_buffers()))
    average.update_parameters(model)
    with torch.no_grad():
        for averaged, parameter in zip(average.module.parameters(), model.parameters(), strict=True):
            if not parameter.requires_grad:
                averaged.copy_(parameter)
