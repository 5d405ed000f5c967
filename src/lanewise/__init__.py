"""Trains a PyTorch model on any number of devices and gets the same model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanewise.task import Loss, Task

__all__ = ["Loss", "Task"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: the command line must not wait for torch."""
    if name in __all__:
        from lanewise import task

        return getattr(task, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
