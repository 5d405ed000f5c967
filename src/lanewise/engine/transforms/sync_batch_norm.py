"""Lets the BatchNorm of a model take its statistics over the lanes that processes run at the same time."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lanewise.errors import ConfigError


def synchronise_batch_norm(model: nn.Module) -> nn.Module:
    """Return a model with torch's SyncBatchNorm in place of each BatchNorm; names and values stay.

    Raises:
        ConfigError: if the model has no BatchNorm.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ConfigError(
            "distributed.sync_batch_norm has nothing to do: the model has no BatchNorm. Leave it out."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted
