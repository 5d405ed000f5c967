"""Numbers about a model: torchmetrics computes them, lanewise merges what the lanes counted."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lanewise.metrics.merge import (
    MetricStates,
    check_metrics,
    load_merged,
    merge_metrics,
    named_values,
    take_states,
)

if TYPE_CHECKING:
    from lanewise.metrics.ranking import RankingMetrics

__all__ = [
    "MetricStates",
    "RankingMetrics",
    "check_metrics",
    "load_merged",
    "merge_metrics",
    "named_values",
    "take_states",
]


def __getattr__(name: str) -> Any:
    """Import what derives from torchmetrics when it is first used: a run without metrics never loads it."""
    if name == "RankingMetrics":
        return import_module("lanewise.metrics.ranking").RankingMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
