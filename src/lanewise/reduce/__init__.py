"""How the gradients of all lanes become one; owns every difference between the modes."""

from lanewise.reduce.buffer import evaluating, kept_buffers
from lanewise.reduce.buffers import LaneBuffers
from lanewise.reduce.build import build_reducer
from lanewise.reduce.crosstalk import Crosstalk
from lanewise.reduce.reducer import LaneWork, Reducer, evaluate_lanes
from lanewise.reduce.totals import LaneTotals, OwnTotals, StepTotals, start_totals
from lanewise.reduce.watch import ParameterWatch

__all__ = [
    "Crosstalk",
    "LaneBuffers",
    "LaneTotals",
    "LaneWork",
    "OwnTotals",
    "ParameterWatch",
    "Reducer",
    "StepTotals",
    "build_reducer",
    "evaluate_lanes",
    "evaluating",
    "kept_buffers",
    "start_totals",
]
