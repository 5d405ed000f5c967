"""Marks of a type hint that say more about a value: its range, or that it is a path."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """What a value must fulfil besides its type."""

    text: str
    """Completes the sentence that begins with `the value must be`."""
    holds: Callable[[Any], bool]


def at_least(bound: int) -> Mark:
    """Mark a number that must be `bound` or more."""
    return Mark(f"at least {bound}", lambda value: value >= bound)


def above(bound: int) -> Mark:
    """Mark a number that must be greater than `bound`; NaN never is."""
    return Mark(f"greater than {bound}", lambda value: value > bound)


def below(bound: int) -> Mark:
    """Mark a number that must be less than `bound`."""
    return Mark(f"less than {bound}", lambda value: value < bound)


def expand_user(path: str) -> str:
    """Write the folder of a user for a leading `~` or `~name`; a path with an unknown name is not changed."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib raises for an unknown name, and drops a "./"


A_PATH = Mark("a path", lambda text: "\0" not in text and not expand_user(text).startswith("~"))
"""Marks text that is a path; `~` is the user's folder."""
