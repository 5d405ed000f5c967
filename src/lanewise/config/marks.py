"""Marks of a type hint that say more about a value: its range, or that it is a path."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class AtLeast:
    """Marks a number that must be `bound` or more."""

    bound: int

    def holds(self, value: float) -> bool:
        """Tell whether `value` is in the range."""
        return value >= self.bound

    def __str__(self) -> str:
        return f"at least {self.bound}"


@dataclass(frozen=True)
class Above:
    """Marks a number that must be greater than `bound`."""

    bound: int

    def holds(self, value: float) -> bool:
        """Tell whether `value` is in the range; NaN never is."""
        return value > self.bound

    def __str__(self) -> str:
        return f"greater than {self.bound}"


@dataclass(frozen=True)
class Below:
    """Marks a number that must be less than `bound`."""

    bound: int

    def holds(self, value: float) -> bool:
        """Tell whether `value` is in the range."""
        return value < self.bound

    def __str__(self) -> str:
        return f"less than {self.bound}"


@dataclass(frozen=True)
class PathLike:
    """Marks text that is a path; `~` is the user's folder."""

    def holds(self, value: str) -> bool:
        """Tell whether `value` can be a path."""
        return "\0" not in value and not expand_user(value).startswith("~")

    def __str__(self) -> str:
        return "a path"


def expand_user(path: str) -> str:
    """Write the folder of a user for a leading `~` or `~name`; a path with an unknown name is not changed."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib raises for an unknown name, and drops a "./"
