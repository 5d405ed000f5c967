"""The section `optimizer`; what an optimizer can be combined with is in `optimizer_rules`."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from lanewise.config.check import Section
from lanewise.config.class_path import ClassConfig


class OptimizerConfig(Section):
    """An optimizer to build: its class and its constructor's arguments, or the class alone."""

    TEXT_KEY: ClassVar = "class_path"

    class_path: str
    """The class, as `module.Class`; its parameters are given at run time."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor by name."""
    closure: bool = False
    """Whether `step` gets a closure, which computes the gradient again, besides the gradient: for SAM and
    others that declare `step(closure=None)` and need one. One that declares `step(closure)`, as LBFGS, gets a
    closure alone without this key."""

    @property
    def of_class(self) -> ClassConfig:
        """The class and its arguments."""
        return ClassConfig(class_path=self.class_path, init_args=self.init_args)
