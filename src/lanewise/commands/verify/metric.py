"""Tests whether metrics can be merged, and whether they depend on how samples are cut into micro-batches."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lanewise.commands.verify.probed_run import ProbedRun, chosen
from lanewise.commands.verify.time_limit import in_time
from lanewise.config import BatchConfig
from lanewise.data import LaneReader
from lanewise.engine.evaluation.eval_set import IndexedSet
from lanewise.engine.step.lanes import TaskLane
from lanewise.lanes import SequentialSchedule
from lanewise.metrics import merge_metrics, named_values, take_states

if TYPE_CHECKING:
    from torchmetrics import Metric

_TOLERANCE = 1e-4
_NUM_SAMPLES = 8


_Values = dict[str, tuple[float, float]]
"""Two values of a metric that should be equal and are not, by its name."""


@dataclass
class MetricProbe:
    """The metrics that depend on how samples are cut or merged, each with two values that show it."""

    unmerged: _Values = field(default_factory=dict)
    """The values of one copy that saw all samples, and of merged copies."""
    of_means: _Values = field(default_factory=dict)
    """The values where a sample comes twice, beside another sample: in one micro-batch, where it counts once,
    and in two micro-batches."""
    of_micro_batches: _Values = field(default_factory=dict)
    """The values of two samples in one micro-batch, and in two."""
    cut_short: list[str] = field(default_factory=list)
    """What took so long that it was looked at less often."""


def probe_metrics(probed: ProbedRun, batch: BatchConfig) -> MetricProbe:
    """Update copies of each metric with a global batch of each eval dataset, cut in several ways."""
    found = MetricProbe()
    if not probed.task.build_metrics():
        return found
    probed.model.eval()
    for name, dataset in probed.eval_datasets.items():
        num_samples = min(len(dataset), batch.global_batch_size)  # type: ignore[arg-type]
        reader = probed.reader_of(dataset, name)
        schedule = SequentialSchedule(num_samples, 1, min(batch.micro_batch_size, max(1, num_samples // 3)))
        found.unmerged |= _unmerged(probed, reader, schedule)
        if batch.micro_batch_size > 1:
            _compare_cuts(probed, reader, min(num_samples, _NUM_SAMPLES), found)
    return found


def _unmerged(probed: ProbedRun, reader: LaneReader, schedule: SequentialSchedule) -> _Values:
    """Compare one copy that sees all samples with two of unequal parts, and with one for each part."""
    whole, first, rest = (_metrics(probed) for _ in range(3))
    each: list[Mapping[str, Metric]] = []
    eval_set = IndexedSet(reader.eval_dataset, reader, schedule)
    batches = eval_set.batches(range(1), probed.device, num_workers=0)
    for number, batch in enumerate(batch for batch in batches if batch.has_samples):
        each.append(_metrics(probed))
        lane = probed.lanes.evaluation_lane(batch)
        _update(probed, lane, (whole, rest if number else first, each[-1]))
    found: _Values = {}
    for parts in ([first, rest][: len(each)], each):
        merged = merge_metrics(probed.task.build_metrics(), [take_states(part) for part in parts])
        found = _differing(reader, named_values(whole), merged) | found
    return found


def _compare_cuts(probed: ProbedRun, reader: LaneReader, num_samples: int, found: MetricProbe) -> None:
    """Compare the values of pairs of samples."""
    samples = reader.read(0, tuple(range(num_samples)))
    num_samples = len(samples)

    def values(*micro_batches: Sequence[int]) -> dict[str, float]:
        metrics = _metrics(probed)
        for positions in micro_batches:
            _update(probed, replace(probed.lane_of(chosen(samples, positions)), evaluates=True), (metrics,))
        return named_values(metrics)

    of_means: _Values = {}
    of_cuts: _Values = {}
    what = f"pairs of samples of {reader.eval_dataset}, for its metrics"
    for first in in_time(range(num_samples - 1), found.cut_short, what):
        other = first + 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as of classes that these samples lack
                alone, together = values([first], [other]), values([first, other])
                twice, in_one = values([first], [first], [other]), values([first, first], [other])
        except Exception:  # noqa: BLE001 - a metric need not have a value of so few samples
            return
        unlike_one = _differing(reader, alone, in_one)
        unlike_twice = _differing(reader, in_one, twice)
        of_means |= {name: pair for name, pair in unlike_twice.items() if name not in unlike_one}
        of_cuts |= _differing(reader, together, alone)
    found.of_means |= of_means
    found.of_micro_batches |= {name: pair for name, pair in of_cuts.items() if name not in of_means}


def _metrics(probed: ProbedRun) -> Mapping[str, "Metric"]:
    return {name: metric.to(probed.device) for name, metric in probed.task.build_metrics().items()}


def _update(probed: ProbedRun, lane: TaskLane, copies: Iterable[Mapping[str, "Metric"]]) -> None:
    with torch.no_grad():
        outputs = lane.forward(probed.model, lane.batch.data)
        for metrics in copies:
            probed.task.update_metrics(metrics, outputs, lane.batch.data)


def _differing(reader: LaneReader, mine: Mapping[str, float], theirs: Mapping[str, float]) -> _Values:
    """Return the values that differ."""
    return {
        f"{reader.eval_dataset}/{name}": (value, theirs.get(name, math.nan))
        for name, value in mine.items()
        if not np.isclose(value, theirs.get(name, math.nan), rtol=_TOLERANCE, atol=1e-6, equal_nan=True)
    }
