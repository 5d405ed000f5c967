"""How the gradients of all lanes become one; owns every difference between the modes."""

from lanewise.reduce.blocks import find_blocks
from lanewise.reduce.buffer import evaluating, kept_buffers
from lanewise.reduce.buffers import LaneBuffers
from lanewise.reduce.build import build_reducer
from lanewise.reduce.crosstalk import Crosstalk
from lanewise.reduce.parameter_monitor import ParameterMonitor
from lanewise.reduce.reach import tensors_in
from lanewise.reduce.reducer import LaneWork, Reducer, evaluate_lanes

__all__ = [
    "Crosstalk",
    "LaneBuffers",
    "LaneWork",
    "ParameterMonitor",
    "Reducer",
    "build_reducer",
    "evaluate_lanes",
    "evaluating",
    "find_blocks",
    "kept_buffers",
    "tensors_in",
]
