"""Trains a PyTorch model on any number of devices and gets the same model."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanewise import data as data
    from lanewise import errors as errors
    from lanewise import hugging_face as hugging_face
    from lanewise import lanes as lanes
    from lanewise import lightning as lightning
    from lanewise import metrics as metrics
    from lanewise import nn as nn
    from lanewise import testing as testing
    from lanewise import trackers as trackers
    from lanewise.commands.jobs.api import TrainResult, evaluate, load, predict, train
    from lanewise.commands.plan.api import plan
    from lanewise.commands.replay.api import replay
    from lanewise.commands.verify.api import verify
    from lanewise.engine.own_loop.lanes import Lanes
    from lanewise.engine.transforms.activation_checkpointing import checkpoint_activations
    from lanewise.processes.world.machine import local_rank_zero_first
    from lanewise.runs.callback import Callback, RunStart
    from lanewise.task import Loss, Task, UpdatedStep

__all__ = ["Callback", "Lanes", "Loss", "RunStart", "Task", "TrainResult", "UpdatedStep"]
__all__ += ["checkpoint_activations", "evaluate", "load", "local_rank_zero_first", "plan", "predict"]
__all__ += ["replay", "train", "verify"]

_NAMES = {
    "commands.jobs.api": ("TrainResult", "evaluate", "load", "predict", "train"),
    "commands.plan.api": ("plan",),
    "commands.replay.api": ("replay",),
    "commands.verify.api": ("verify",),
    "engine.own_loop.lanes": ("Lanes",),
    "engine.transforms.activation_checkpointing": ("checkpoint_activations",),
    "processes.world.machine": ("local_rank_zero_first",),
    "runs.callback": ("Callback", "RunStart"),
    "task": ("Loss", "Task", "UpdatedStep"),
}
_MODULES = {name: f"lanewise.{module}" for module, names in _NAMES.items() for name in names}
_PACKAGES = ("data", "errors", "hugging_face", "lanes", "lightning", "metrics", "nn", "testing", "trackers")


def __dir__() -> list[str]:
    """List the public names, which are not there yet; of the packages those that can be imported."""
    packages = (name for name in _PACKAGES if name != "hugging_face" or find_spec("transformers"))
    return [*(name for name in globals() if name.startswith("__")), *__all__, *packages]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: the command line must not wait for torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
