"""Merges the metrics of all lanes, so that no value depends on how lanes are spread over processes.

torchmetrics' own synchronisation merges the states of ranks. Here the states of lanes are merged by the same
declared reductions, in lane order, wherever they were counted; so not even a float sum depends on the
partition, and a process without samples has nothing to send.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from lanewise.errors import TaskError

if TYPE_CHECKING:
    from torchmetrics import Metric

MetricStates = dict[str, tuple[int, dict[str, Any]]]
"""How often each metric was updated, by its name, and its states, on the CPU."""


def check_metrics(metrics: Mapping[str, "Metric"]) -> None:
    """Make sure that the states of lanes can be merged.

    Raises:
        TaskError: names the metric and the state that declares no reduction.
    """
    for name, metric in metrics.items():
        if not hasattr(metric, "_reductions"):
            raise TaskError(
                f"metric {name} ({type(metric).__name__}) is not a torchmetrics.Metric. "
                "For a MetricCollection, return the metrics by name: dict(collection.items())."
            )
        problems = [] if metric._reductions else ["it has no states of its own"]
        problems += [
            f"state {state} declares no reduction"
            for state, reduction in metric._reductions.items()
            if reduction is None and not isinstance(metric._defaults[state], list)  # lists are joined
        ]
        compute = type(metric).compute
        if problems and metric._reductions and compute.__module__.startswith("torchmetrics."):
            if compute.__qualname__ != "NormalizedRootMeanSquaredError.compute":
                continue  # it merges stacked states, as for torchmetrics' own synchronisation
            problems = ["torchmetrics merges two of its states, and fails for more"]
        if problems:
            raise TaskError(
                f"metric {name} ({type(metric).__name__}) cannot be merged over lanes: {problems[0]}. "
                "Use metrics whose states are added with dist_reduce_fx, such as the ones that it wraps. "
                "That of an own metric may be a function of the stacked states of all lanes."
            )


def take_states(metrics: Mapping[str, "Metric"]) -> MetricStates:
    """Return what a lane's metrics counted, ready to be sent to other processes."""
    return {
        name: (metric._update_count, {state: _to_cpu(getattr(metric, state)) for state in metric._reductions})
        for name, metric in metrics.items()
    }


def set_aside(metric: "Metric") -> tuple[int, dict[str, Any]]:
    """Return how often a metric was updated, and its states, where they are; a reset leaves them so."""
    states = {state: getattr(metric, state) for state in metric._reductions}
    for state, value in states.items():
        if isinstance(value, list):  # which a reset would empty
            setattr(metric, state, [])
    return metric._update_count, states


def load_merged(metrics: Mapping[str, "Metric"], lanes: Sequence[MetricStates]) -> None:
    """Put the merged states of all lanes into metrics, ready to compute.

    Args:
        metrics: receive the states, on the device where they are.
        lanes: what each lane counted, in lane order; lanes without samples are left out.
    """
    for name, metric in metrics.items():
        device = metric.device
        metric.reset()
        for state, reduction in metric._reductions.items():
            parts = [states[name][1][state] for states in lanes]
            if isinstance(parts[0], list):  # as one metric has them; what it computes joins their tensors
                merged: Any = [tensor for part in parts for tensor in part]
            elif reduction is None:  # a part may have been merged; torchmetrics, too, stacks only several
                shape = (-1, *getattr(metric, state).shape)
                merged = torch.cat([part.reshape(shape) for part in parts]).squeeze(0)
            else:
                merged = reduction(torch.stack(parts))  # type: ignore[operator]  # a function by add_state
            setattr(metric, state, merged)
        metric._update_count = sum(states[name][0] for states in lanes)
        metric._to_sync = False  # every process has all states already
        metric.to(device)


@final
class LaneMetrics:
    """Lets the same metrics count for each lane of a process, also where the lanes take turns.

    Args:
        metrics: by name.
    """

    def __init__(self, metrics: Mapping[str, "Metric"]) -> None:
        self._metrics = metrics
        self._lane: int | None = None
        self._waiting: dict[int, dict[str, tuple[int, dict[str, Any]]]] = {}
        """What the metrics of each lane hold until it goes on: where they are, as it is."""
        self.counted: dict[int, MetricStates] = {}
        """What each lane that has ended counted, ready to be sent to other processes."""

    def turn_to(self, lane: int) -> None:
        """Put into the metrics what they held of a lane, which is nothing at its beginning."""
        if lane == self._lane:
            return
        if self._lane is not None:
            self._waiting[self._lane] = {name: set_aside(metric) for name, metric in self._metrics.items()}
        held = self._waiting.pop(lane, {})
        for name, metric in self._metrics.items():
            metric.reset()
            if name in held:
                metric._update_count, states = held[name]
                for state, value in states.items():
                    setattr(metric, state, value)
        self._lane = lane

    def end_lane(self) -> None:
        """Take what the lane counted to which the metrics were turned: its last micro-batch was counted."""
        assert self._lane is not None
        self.counted[self._lane] = take_states(self._metrics)
        self._lane = None


def merge_metrics(metrics: Mapping[str, "Metric"], lanes: Sequence[MetricStates]) -> dict[str, float]:
    """Compute the metrics over all lanes.

    Args:
        metrics: metrics as the task builds them; they receive the merged states.
        lanes: what each lane counted, in lane order; lanes without samples are left out.

    Returns:
        Each metric's value. One with several values gives several: `name/key`, or `name/index`.
    """
    load_merged(metrics, lanes)
    return named_values(metrics)


def named_values(metrics: Mapping[str, "Metric"]) -> dict[str, float]:
    """Compute the metrics that were updated; one with several values gives `name/key`, or `name/index`."""
    return {
        key: value
        for name, metric in metrics.items()
        if metric._update_count
        for key, value in _flatten(name, metric.compute()).items()
    }


def _to_cpu(state: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return [part.cpu() for part in state] if isinstance(state, list) else state.cpu()


def _flatten(name: str, value: Any) -> dict[str, float]:
    """Name every number in a metric's value."""
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    if is_number or not isinstance(value, Mapping | torch.Tensor | list | tuple):
        return {name: float(value)}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {key: number for part, item in items for key, number in _flatten(f"{name}/{part}", item).items()}
