"""Trains a PyTorch model on any number of devices and gets the same model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanewise.callback import Callback, RunStart
    from lanewise.engine.own_loop.lanes import Lanes
    from lanewise.jobs.api import TrainResult, evaluate, load, predict, train
    from lanewise.task import Loss, Task
    from lanewise.transforms.activation_checkpointing import checkpoint_activations
    from lanewise.world.machine import local_rank_zero_first

__all__ = [
    "Callback",
    "Lanes",
    "Loss",
    "RunStart",
    "Task",
    "TrainResult",
    "checkpoint_activations",
    "evaluate",
    "load",
    "local_rank_zero_first",
    "predict",
    "train",
]

_MODULES = {
    "Callback": "lanewise.callback",
    "Lanes": "lanewise.engine.own_loop.lanes",
    "Loss": "lanewise.task",
    "RunStart": "lanewise.callback",
    "Task": "lanewise.task",
    "TrainResult": "lanewise.jobs.api",
    "checkpoint_activations": "lanewise.transforms.activation_checkpointing",
    "evaluate": "lanewise.jobs.api",
    "load": "lanewise.jobs.api",
    "local_rank_zero_first": "lanewise.world.machine",
    "predict": "lanewise.jobs.api",
    "train": "lanewise.jobs.api",
}


def __dir__() -> list[str]:
    """List the public names, which are not there yet."""
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: the command line must not wait for torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
