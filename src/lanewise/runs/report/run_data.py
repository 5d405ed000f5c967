"""Reads all that a run left for a report, and says what could not be read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lanewise.config.strict_yaml import read_yaml
from lanewise.errors import LanewiseError, text_of
from lanewise.runs.dir import RunDir
from lanewise.runs.file import open_regular
from lanewise.runs.report.lines import JsonLinesReader, files_of_ranks
from lanewise.runs.report.logs import LogFindings, read_logs
from lanewise.runs.report.series import Points, read_series
from lanewise.runs.report.status import RunStatus, finite, read_status, seconds_of

_STEP = re.compile(r"step-(\d+)")
_MOST_BYTES = 16 * 2**20
"""How much is read of a configuration, or of a table of verify or bench."""


class Moment(NamedTuple):
    """Something that happened to a run."""

    time: float
    """The time, in seconds since the epoch."""
    kind: str
    """`start`, `end`, `checkpoint` or `jump`."""
    text: str


@dataclass
class RunData:
    """What a run left."""

    name: str
    status: RunStatus
    config: Mapping[str, Any]
    """The configuration as a tree of plain values; empty where it cannot be read."""
    series: Mapping[str, Points]
    """The points of each metric, by its name."""
    phases: Mapping[int, Mapping[str, Points]]
    """What each rank spent its time on, and its memory."""
    moments: Sequence[Moment]
    findings: LogFindings
    tables: Sequence[tuple[str, Mapping[str, Any]]]
    """What `verify` and `bench` wrote into the folder, by the name of the file."""
    media: Sequence[Mapping[str, Any]] = ()
    """The lines of media.jsonl: texts, and images as PNG in base64."""
    problems: list[str] = field(default_factory=list)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a step; None where the configuration does not tell."""
        batch = self.config.get("batch")
        size = batch.get("global_batch_size") if isinstance(batch, Mapping) else None
        return size if type(size) is int else None


def read_run(folder: Path, name: str) -> RunData:
    """Read what a run left.

    Args:
        folder: of the run.
        name: what the report calls it.
    """
    run_dir = RunDir(folder)
    metrics, record = JsonLinesReader(run_dir.metrics), JsonLinesReader(run_dir.record)
    events = list(record)
    series = read_series(metrics, jumps := list[Mapping[str, Any]]())
    findings = read_logs(run_dir.log(0).parent)
    problems = [*metrics.problems, *record.problems, *findings.problems]
    phases: dict[int, Mapping[str, Points]] = {}
    for rank, path in files_of_ranks(run_dir.phases, ".jsonl"):
        lines = JsonLinesReader(path)
        phases[rank] = read_series(lines)
        problems += [f"{run_dir.phases.name}/{problem}" for problem in lines.problems]
    if not phases:
        problems.append(f"{run_dir.phases.name} is not there, or empty")
    config, why = _config(run_dir.config)
    problems += why
    moments = sorted([*_moments(events), *_checkpoints(run_dir.checkpoints), *_jumps(jumps)])
    tables = list(_tables(folder))
    media = JsonLinesReader(run_dir.media) if run_dir.media.exists() else ()
    shown = [line for line in media if {"name", "step"} <= line.keys()][-100:]  # for the size of the page
    of_run = name, read_status(folder), config, series, phases, moments, findings, tables
    return RunData(*of_run, shown, problems)


def _config(file: Path) -> tuple[Mapping[str, Any], list[str]]:
    try:
        with open_regular(file) as opened:
            text = opened.read(_MOST_BYTES).decode()
        tree = read_yaml(text, source=file.name)
    except FileNotFoundError:
        return {}, [f"{file.name} is not there"]
    except (OSError, UnicodeDecodeError, LanewiseError) as error:
        return {}, [f"{file.name} cannot be read: {text_of(error).splitlines()[0]}"]
    return (tree, []) if isinstance(tree, dict) else ({}, [f"{file.name} is no configuration"])


def _moments(events: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
    for event in events:
        moment = seconds_of(event.get("time"))
        if moment is None:
            continue
        if event.get("event") == "start":
            size = event.get("world_size")
            processes = "1 process" if size == 1 else f"{size} processes"
            yield Moment(moment, "start", f"start on {processes}, from step {event.get('first_step')}")
        elif event.get("event") == "end":
            step, text = event.get("last_step"), str(event.get("text") or "").partition("\n")[0]
            after = "" if step is None else f" after step {step}"
            yield Moment(moment, "end", f"{event.get('reason')}{after}{': ' if text else ''}{text}")


def _jumps(lines: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
    for line in lines:
        if (moment := finite(line.get("time"))) is not None:
            largest = f"the largest: {json.dumps(line.get('largest_loss')):.200}"
            yield Moment(moment, "jump", f"loss {line.get('loss')} up to step {line.get('step')}, {largest}")


def _checkpoints(folder: Path) -> Iterator[Moment]:
    with suppress(OSError):
        for path in folder.iterdir():
            if match := _STEP.fullmatch(path.name):
                yield Moment(path.stat().st_mtime, "checkpoint", f"checkpoint after step {int(match[1]):,}")


def _tables(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with suppress(OSError):
        for path in sorted(folder.glob("*.json")):
            with suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
                tree: Any = json.loads(file.read(_MOST_BYTES))
                if isinstance(tree, dict) and ({"rows", "bound"} <= tree.keys() or "layouts" in tree):
                    yield path.name, tree
