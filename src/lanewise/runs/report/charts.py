"""Chooses the charts of a report, and the points of their lines."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from lanewise.runs.report.run_data import RunData
from lanewise.runs.report.series import mean_of, thinned, to_json

_TITLES: Mapping[str, tuple[str, str]] = {
    "train/learning_rate": ("Learning rate", ""),
    "train/grad_norm": ("Norm of the gradient", ""),
    "train/skipped_steps": ("Steps that fp16 skipped", "steps"),
    "train/weight": ("Weight of a step", "what the losses count"),
    "perf/samples_per_second": ("Speed", "samples/s"),
    "perf/units_per_second": ("Speed in what the losses count", "units/s"),
    "perf/tflops_per_second": ("Operations of a device", "TFLOP/s"),
    "perf/mfu": ("Part of the device's peak (MFU)", ""),
    "memory/peak_gib": ("Peak memory of rank 0", "GiB"),
}
"""The title and the unit of each chart that has a single metric."""
_SEVERAL: Mapping[str, tuple[str, Sequence[str]]] = {
    "Time of a step": ("seconds", ("perf/step_p50_seconds", "perf/step_p95_seconds")),
    "Slowest rank": ("seconds", ("perf/slowest_rank_seconds", "perf/median_rank_seconds")),
}
_PHASES = "time/"
_OURS = ("perf", "time", "memory", "data", "gradients")
"""The groups of what losses and evaluations do not report."""
_MOST_RANKS = 64
_MOST_LINES = 40
"""The most lines of a chart; as many metrics have a chart of their own."""
_KINDS = ("start", "end", "checkpoint", "jump")


class Chart(NamedTuple):
    """A chart as the page draws it."""

    title: str
    kind: str
    """`lines`, `bars` or `moments`."""
    unit: str
    lines: list[dict[str, Any]]


def charts_of(runs: Sequence[RunData]) -> tuple[list[Chart], int]:
    """Return the charts that have something to show, and how many metrics there is no room for."""
    begins = [_begin(run) for run in runs]
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    evaluated = {name for run in runs for name in run.status.evaluation if name.endswith("/loss")}
    losses = [name for name in names if name in {"train/loss", *evaluated}]
    shown = {*losses, *_TITLES, *(name for _, of_chart in _SEVERAL.values() for name in of_chart)}
    charts = [_lines("Loss", "", losses[:_MOST_LINES], runs, begins)]
    others = [name for name in names if name not in shown and name.partition("/")[0] not in _OURS]
    charts += [_lines(name, "", [name], runs, begins) for name in others[:_MOST_LINES]]
    charts += [_lines(title, unit, [name], runs, begins) for name, (title, unit) in _TITLES.items()]
    charts += [_lines(title, unit, of_chart, runs, begins) for title, (unit, of_chart) in _SEVERAL.items()]
    charts.append(Chart("Parts of a step, by process", "bars", "seconds", list(_phases(runs))))
    charts.append(Chart("Memory, by process", "bars", "GiB", list(_memory(runs))))
    charts.append(Chart("Starts, ends, checkpoints, jumps", "moments", "", list(_moments(runs, begins))))
    num_left_out = sum(max(0, len(of_kind) - _MOST_LINES) for of_kind in (losses, others))
    return [chart for chart in charts if chart.lines], num_left_out


def _begin(run: RunData) -> float:
    """Return the time from which a run's time counts."""
    if run.status.started is not None:
        return run.status.started
    times = [points.times[np.isfinite(points.times)] for points in run.series.values()]
    return float(min((of_metric.min() for of_metric in times if len(of_metric)), default=0.0))


def _lines(
    title: str, unit: str, names: Sequence[str], runs: Sequence[RunData], begins: Sequence[float]
) -> Chart:
    lines = [
        {
            "run": number,
            "name": name,
            "steps": to_json(points.steps),
            "times": to_json(points.times - begin),
            "values": to_json(points.values),
        }
        for number, (run, begin) in enumerate(zip(runs, begins, strict=True))
        for name in names
        if name in run.series
        for points in (thinned(run.series[name]),)
    ]
    return Chart(title, "lines", unit, lines)


def _phases(runs: Sequence[RunData]) -> Iterator[dict[str, Any]]:
    """Yield a line for each phase, with the mean over the run of each process."""
    for number, run in enumerate(runs):
        ranks = sorted(run.phases)[:_MOST_RANKS]
        names = dict.fromkeys(name for rank in ranks for name in run.phases[rank] if name.startswith(_PHASES))
        for name in list(names)[:_MOST_LINES]:
            values = [mean_of(run.phases[rank], name) or 0.0 for rank in ranks]
            phase = name.removeprefix(_PHASES).removesuffix("_seconds")
            yield _bar(number, runs, phase, ranks, values)


def _memory(runs: Sequence[RunData]) -> Iterator[dict[str, Any]]:
    for number, run in enumerate(runs):
        peaks: dict[int, float] = {}
        for rank in sorted(run.phases)[:_MOST_RANKS]:
            if (points := run.phases[rank].get("memory/peak_gib")) is not None:
                peaks[rank] = float(np.max(points.values, initial=0.0, where=np.isfinite(points.values)))
        if peaks:
            yield _bar(number, runs, "peak", list(peaks), list(peaks.values()))


def _bar(
    number: int, runs: Sequence[RunData], name: str, ranks: Sequence[int], values: Sequence[float]
) -> dict[str, Any]:
    before = f"{runs[number].name}: " if len(runs) > 1 else ""
    labels = [f"{before}rank {rank}" for rank in ranks]
    return {"run": number, "name": name, "labels": labels, "values": to_json(np.array(values))}


def _moments(runs: Sequence[RunData], begins: Sequence[float]) -> Iterator[dict[str, Any]]:
    for number, (run, begin) in enumerate(zip(runs, begins, strict=True)):
        for kind in _KINDS:
            if moments := [moment for moment in run.moments if moment.kind == kind]:
                yield {
                    "run": number,
                    "name": kind,
                    "times": [round(moment.time - begin, 3) for moment in moments],
                    "dates": [written(moment.time) for moment in moments],
                    "texts": [moment.text for moment in moments],
                }


def written(seconds: float) -> str:
    """Write a time as people of this machine's time zone read it."""
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
