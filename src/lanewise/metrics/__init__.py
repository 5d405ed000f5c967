"""Numbers about a model: torchmetrics computes them, lanewise merges what the lanes counted."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lanewise.metrics.merge import LaneMetrics as LaneMetrics
from lanewise.metrics.merge import MetricStates as MetricStates
from lanewise.metrics.merge import check_metrics as check_metrics
from lanewise.metrics.merge import load_merged as load_merged
from lanewise.metrics.merge import merge_metrics as merge_metrics
from lanewise.metrics.merge import named_values as named_values
from lanewise.metrics.merge import set_aside as set_aside
from lanewise.metrics.merge import take_states as take_states

if TYPE_CHECKING:
    from lanewise.metrics.ranking import RankingMetrics as RankingMetrics


def __getattr__(name: str) -> Any:
    """Import what derives from torchmetrics when it is first used: a run without metrics never loads it."""
    if name == "RankingMetrics":
        return import_module("lanewise.metrics.ranking").RankingMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
