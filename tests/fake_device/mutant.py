"""Plants faults into functions of lanewise, in the process that runs a test."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from lanewise import Task
from tests.fake_device.tasks import Words


@dataclass(frozen=True)
class Mutant:
    """A fault: what a module says instead of what it says."""

    name: str
    module: str
    changes: Mapping[str, str]
    """Text of the module, each found once in it, and what takes its place."""
    task: type[Task] = Words
    layout: str = "single"
    """Where it shows."""
    found_in: str = "last"
    """An order in which it is found."""

    def plant(self) -> None:
        """Give the functions and methods of the module the code of the changed text.

        They stay the same objects, so that it does not matter who imported them.
        """
        module = importlib.import_module(self.module)
        text = inspect.getsource(module)
        for old, new in self.changes.items():
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        changed: dict[str, Any] = {"__name__": self.module, "__file__": module.__file__}
        exec(compile(text, f"{module.__file__} with {self.name}", "exec"), changed)
        _replace(vars(module), changed, self.module)


def _replace(names: Any, changed: Any, module: str) -> None:
    for name, value in list(names.items()):
        ours, theirs = inspect.unwrap(_function(value)), inspect.unwrap(_function(changed.get(name)))
        if isinstance(ours, FunctionType) and isinstance(theirs, FunctionType) and ours.__module__ == module:
            ours.__code__ = theirs.__code__
        elif isinstance(value, type) and value.__module__ == module:
            _replace(vars(value), vars(changed[name]), module)


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value
