"""Reads metrics.jsonl into columns of numbers, a million lines at a time, and thins them for a chart."""

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tsdownsample import MinMaxDownsampler

from lanewise.runs.jumps import JUMP
from lanewise.runs.report.lines import JsonLinesReader, count_of

MOST_POINTS = 600
"""The most points of a line in a chart; a screen has about twice as many columns."""
_PLACES = ("epoch", "step", "time")


class Points(NamedTuple):
    """The points of a line in a chart."""

    steps: NDArray[np.float64]
    times: NDArray[np.float64]
    """The times, in seconds since the epoch."""
    values: NDArray[np.float64]
    """NaN where the run wrote no number: a gap."""


@dataclass
class _Table:
    """The lines that have the same names, as columns."""

    names: tuple[str, ...]
    rows: "array[float]" = field(default_factory=lambda: array("d"))
    """The numbers of one line after the other."""

    def append(self, line: Mapping[str, Any]) -> None:
        begin = len(self.rows)
        try:
            self.rows.extend(line.values())
        except (TypeError, OverflowError):  # null, or what is no number of this size
            del self.rows[begin:]
            self.rows.extend(map(_number, line.values()))

    def columns(self) -> dict[str, NDArray[np.float64]]:
        rows = np.frombuffer(self.rows).reshape(-1, len(self.names))
        return dict(zip(self.names, rows.T, strict=True))


def _number(value: object) -> float:
    with suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else math.nan
    return math.nan


def read_series(lines: JsonLinesReader, jumps: list[Mapping[str, Any]] | None = None) -> dict[str, Points]:
    """Return the points of every metric, in the order in which they were written.

    Args:
        lines: of a file with a step, and mostly a time, in each line; others are left out, as
            are events.
        jumps: gets those of the loss.
    """
    tables: dict[tuple[str, ...], _Table] = {}
    for line in lines:
        if jumps is not None and line.get("event") == JUMP:
            jumps.append(line)
        if count_of(line.get("step")) is None or "event" in line:
            continue
        line.pop("largest_loss", None)  # no number
        names = tuple(line)
        table = tables.get(names)
        if table is None:
            table = tables[names] = _Table(names)
        table.append(line)
    found: dict[str, list[Points]] = {}
    for table in tables.values():
        columns = table.columns()
        steps = columns["step"]
        times = columns.get("time", np.full_like(steps, np.nan))
        for name, values in columns.items():
            if name not in _PLACES:
                found.setdefault(name, []).append(Points(steps, times, values))
    return {name: _in_order(parts) for name, parts in found.items()}


def _in_order(parts: Sequence[Points]) -> Points:
    if len(parts) == 1:
        return parts[0]
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return Points(*(column[order] for column in joined))


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most about so many points, of which each stretch keeps its extremes; gaps stay gaps."""
    is_number = np.isfinite(points.values)
    numbers = np.flatnonzero(is_number)
    if len(numbers) > most:
        chosen = MinMaxDownsampler().downsample(  # type: ignore[no-untyped-call]
            np.ascontiguousarray(points.values[numbers]), n_out=most - most % 2
        )
        kept = {int(numbers[index]) for index in chosen} | {int(numbers[0]), int(numbers[-1])}
        numbers = np.array(sorted(kept), dtype=np.int64)
    # One point without a value stands for all between two that are kept.
    num_gaps = np.cumsum(~is_number)
    gaps = [
        int(np.searchsorted(num_gaps, num_gaps[begin] + 1))
        for begin, end in pairwise(numbers)
        if num_gaps[end] > num_gaps[begin]
    ]
    places = np.sort(np.concatenate([numbers, np.array(gaps, dtype=np.int64)]))
    return Points(*(column[places] for column in points))


def to_json(values: NDArray[np.float64]) -> list[float | int | None]:
    """Return numbers as JSON takes them, with six digits."""

    def rounded(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")

    return [rounded(value) for value in values.tolist()]


def mean_of(points: Mapping[str, Points], name: str) -> float | None:
    """Return the mean over the steps of a metric whose numbers are of all steps since the line before.

    None where there are none.
    """
    if name not in points:
        return None
    steps, _, values = points[name]
    num_steps = np.maximum(np.diff(steps, prepend=0.0), 0.0)
    weights = np.where(np.isfinite(values) & np.isfinite(num_steps), num_steps, 0.0)
    return float(np.average(np.nan_to_num(values), weights=weights)) if weights.sum() else None
