"""The section `optimizer`; what an optimizer can be combined with is in `optimizer_rules`."""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar

from lanewise.config.check import Mark, Section
from lanewise.config.class_path import ClassConfig


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


class ParameterGroup(Section):
    """Parameters with options of their own. It may be a list of the two: `[[bias, norm], {lr: 1e-4}]`."""

    LIST_KEYS: ClassVar = ("patterns", "options")

    patterns: tuple[Annotated[str, Mark("a regular expression", _is_expression)], ...]
    """Regular expressions, of which one is found in the name of each of the parameters."""
    options: Mapping[str, Any]
    """Options of the optimizer for them, in place of those in init_args."""


class OptimizerConfig(Section):
    """An optimizer to build: its class and its constructor's arguments, or the class alone."""

    TEXT_KEY: ClassVar = "class_path"

    class_path: str
    """The class, as `module.Class`, or a function that returns an optimizer; its parameters are given at run
    time."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor by name."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Groups of parameters, such as `[[[bias, norm], {weight_decay: 0.0}]]`: a parameter is in the first of
    which a pattern is found in its name, and else in a last group, with init_args alone."""
    closure: bool = False
    """Whether `step` gets a closure, which computes the gradient again, besides the gradient: for SAM and
    others that declare `step(closure=None)` and need one. One that declares `step(closure)`, as LBFGS, gets a
    closure alone without this key."""

    @property
    def of_class(self) -> ClassConfig:
        """The class and its arguments."""
        return ClassConfig(class_path=self.class_path, init_args=self.init_args)
