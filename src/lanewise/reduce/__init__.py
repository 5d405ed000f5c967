"""How the gradients of all lanes become one; owns every difference between the modes."""

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
