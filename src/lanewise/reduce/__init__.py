"""Sums the gradients of all lanes; every difference between the reducers is in this package."""

from lanewise.reduce.blocks import find_blocks
from lanewise.reduce.build import build_reducer
from lanewise.reduce.reducer import LaneWork, Reducer, evaluate_lanes

__all__ = [
    "LaneWork",
    "Reducer",
    "build_reducer",
    "evaluate_lanes",
    "find_blocks",
]
