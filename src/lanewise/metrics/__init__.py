"""Numbers about a model: torchmetrics computes them, lanewise merges what the lanes counted."""

from lanewise.metrics.merge import (
    MetricStates,
    check_metrics,
    load_merged,
    merge_metrics,
    named_values,
    take_states,
)

__all__ = ["MetricStates", "check_metrics", "load_merged", "merge_metrics", "named_values", "take_states"]
