"""Trains a PyTorch model on any number of devices and gets the same model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanewise.commands.jobs.api import TrainResult, evaluate, load, predict, train
    from lanewise.commands.plan.api import plan
    from lanewise.commands.verify.api import verify
    from lanewise.engine.own_loop.lanes import Lanes
    from lanewise.engine.transforms.activation_checkpointing import checkpoint_activations
    from lanewise.processes.world.machine import local_rank_zero_first
    from lanewise.runs.callback import Callback, RunStart
    from lanewise.task import Loss, Task, UpdatedStep

__all__ = [
    "Callback",
    "Lanes",
    "Loss",
    "RunStart",
    "Task",
    "TrainResult",
    "UpdatedStep",
    "checkpoint_activations",
    "evaluate",
    "load",
    "local_rank_zero_first",
    "plan",
    "predict",
    "train",
    "verify",
]

_MODULES = {
    "Callback": "lanewise.runs.callback",
    "Lanes": "lanewise.engine.own_loop.lanes",
    "Loss": "lanewise.task",
    "RunStart": "lanewise.runs.callback",
    "Task": "lanewise.task",
    "TrainResult": "lanewise.commands.jobs.api",
    "UpdatedStep": "lanewise.task",
    "checkpoint_activations": "lanewise.engine.transforms.activation_checkpointing",
    "evaluate": "lanewise.commands.jobs.api",
    "load": "lanewise.commands.jobs.api",
    "local_rank_zero_first": "lanewise.processes.world.machine",
    "plan": "lanewise.commands.plan.api",
    "predict": "lanewise.commands.jobs.api",
    "train": "lanewise.commands.jobs.api",
    "verify": "lanewise.commands.verify.api",
}


def __dir__() -> list[str]:
    """List the public names, which are not there yet."""
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: the command line must not wait for torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
