"""An object that a configuration names by its class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lanewise.config.check import Section


@dataclass(frozen=True, kw_only=True)
class ClassConfig(Section):
    """An object to build: its class and its constructor's arguments."""

    class_path: str
    """The class, as `module.Class`."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor by name; those that only the running program knows are left out."""
