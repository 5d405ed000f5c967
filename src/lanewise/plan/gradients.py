"""Gradients that come or go in a lane's backward, as its tape is played."""

from collections.abc import Callable, Sequence

from lanewise.plan.model import Weight
from lanewise.plan.tape import Mark, Stretch


def arriving(weights: Sequence[Weight]) -> Callable[[Stretch], int]:
    """Return what adds up the gradients that are complete, as a tape is played."""
    total = 0

    def add(stretch: Stretch) -> int:
        nonlocal total
        if stretch.mark is Mark.GRADIENT:
            total += weights[stretch.number].num_bytes
        return total

    return add


def leaving(weights: Sequence[Weight]) -> Callable[[Stretch], int]:
    """Return what takes earlier sums of the gradients away, each when its own gradient is complete."""
    size = sum(weight.num_bytes for weight in weights if weight.is_trained)
    arrived = arriving(weights)
    return lambda stretch: size - arrived(stretch)
