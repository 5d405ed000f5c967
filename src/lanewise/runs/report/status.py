"""Tells how a run stands by the files that it left, however damaged they are."""

import math
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from lanewise.config.better import mode_by_name
from lanewise.runs.cut import is_evaluation
from lanewise.runs.dir import RunDir
from lanewise.runs.report.lines import JsonLinesReader, count_of

State = Literal["running", "finished", "stopped early", "preempted", "failed", "killed", "unknown"]

_REASONS: Mapping[str, State] = {
    "finished": "finished",
    "stopped early": "stopped early",
    "preempted": "preempted",
    "error": "failed",
}
_TAIL_BYTES = 16 * 2**20
"""How much of the end of the metrics the last values and the best one are looked for in."""
_NUM_LINES_OF_SPEED = 20
_LEAST_SECONDS_OF_LIFE = 120.0
_NUM_LINES_OF_LIFE = 10
"""A run of another host has ended if it wrote nothing for so long, and for as long as so many lines take."""
MOST_SECONDS = 1e9
_DEPTH = 3


@dataclass(frozen=True)
class RunStatus:
    """How a run stands."""

    run_dir: Path
    state: State
    started: float | None = None
    """Time of the first start, in seconds since the epoch."""
    num_starts: int = 0
    step: int | None = None
    """The last step that is known, from 1."""
    last_step: int | None = None
    """The step after which training ends."""
    seconds_left: float | None = None
    """How long it trains yet, by the speed of the last lines; None where it does not run."""
    devices: str = ""
    reducer: str = ""
    """Empty where there is one device, on which all reducers are the same."""
    seconds: float | None = None
    """How long the last start took; of one that has no end, until its last line."""
    samples_per_second: float | None = None
    """The speed of the last line that has one."""
    loss: float | None = None
    """The loss of the training, in the last line that has one."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """The values of the last evaluation."""
    best: tuple[str, int, float] | None = None
    """The name, the step and the value of the best evaluation, where `evaluate.best` names one."""
    error: str = ""
    """The first line of the error that ended it."""
    next_command: str = ""
    """What goes on with it; empty where nothing does."""
    problems: Sequence[str] = ()
    """What of its files could not be read."""


def find_runs(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the folders of runs in a folder, or the folder itself if it is one; not those inside of a run."""
    run_dir = RunDir(folder)
    if any(os.path.lexists(file) for file in (run_dir.record, run_dir.metrics)):
        yield folder
        return
    if depth:
        with suppress(OSError):
            for child in sorted(folder.iterdir()):
                if child.is_dir() and not child.is_symlink():
                    yield from find_runs(child, depth - 1)


def read_status(folder: Path, last_bytes: int | None = _TAIL_BYTES) -> RunStatus:
    """Read how a run stands.

    Args:
        folder: of the run.
        last_bytes: how much of the end of its metrics is read; None: all, so that the best is sure.
    """
    run_dir, problems = RunDir(folder), list[str]()
    record = JsonLinesReader(run_dir.record)
    events = [event for event in record if event.get("event") in ("start", "end")]
    metrics = JsonLinesReader(run_dir.metrics, last_bytes)
    lines = [line for line in metrics if count_of(line.get("step")) is not None]
    problems = [*record.problems, *metrics.problems]
    starts = [event for event in events if event["event"] == "start"]
    start = starts[-1] if starts else {}
    state = _state(run_dir, events, lines)
    has_end = bool(events) and events[-1]["event"] == "end"
    step = count_of(events[-1].get("last_step")) if has_end else None
    if step is None and lines:
        step = lines[-1]["step"]
    last_step = count_of(start.get("last_step"))
    evaluated = [line for line in lines if is_evaluation(line)]
    has_ended = state not in ("running", "finished")
    error = str(events[-1].get("text") or events[-1].get("error") or "") if has_end else ""
    return RunStatus(
        run_dir=folder,
        state=state,
        started=seconds_of(starts[0].get("time")) if starts else None,
        num_starts=len(starts),
        step=step,
        last_step=last_step,
        seconds_left=_seconds_left(lines, last_step) if state == "running" else None,
        devices=_devices(start),
        reducer=_reducer(start),
        seconds=_seconds(start, events[-1] if has_end else {}, lines),
        samples_per_second=_last(lines, "perf/samples_per_second"),
        loss=_last(lines, "train/loss"),
        evaluation=next(filter(None, map(_evaluation, reversed(evaluated))), {}),
        best=_best(evaluated, start),
        error=error.splitlines()[0] if error.strip() else "",
        next_command=_next_command(run_dir) if has_ended else "",
        problems=problems,
    )


def seconds_of(written: object) -> float | None:
    """Return a time of run.jsonl in seconds since the epoch."""
    with suppress(ValueError, TypeError, OverflowError):
        return datetime.fromisoformat(str(written)).astimezone(UTC).timestamp()
    return None


def is_held(run_dir: RunDir) -> bool:
    """Tell whether a process of this machine has the lock of a run, which it holds as long as it lives.

    The lock is not touched: even for a moment that would keep a run from starting.
    """
    with suppress(OSError):
        number = (run_dir.path / ".lock").stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        return any("FLOCK" in line and f":{number} " in line for line in locks)
    return False


def _state(run_dir: RunDir, events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> State:
    if events and events[-1]["event"] == "end":
        return _REASONS.get(str(events[-1].get("reason")), "unknown")
    if is_held(run_dir):
        return "running"
    if not events:
        return "unknown"
    hosts = events[-1].get("hosts")
    is_elsewhere = isinstance(hosts, dict) and socket.gethostname() not in hosts
    return "running" if is_elsewhere and _is_alive(lines, seconds_of(events[-1].get("time"))) else "killed"


def _is_alive(lines: Sequence[Mapping[str, Any]], started: float | None) -> bool:
    """Tell whether the last line is as young as those of a run that goes on."""
    times = [moment for line in lines[-_NUM_LINES_OF_SPEED:] if (moment := _value(line, "time")) is not None]
    last = times[-1] if times else started
    if last is None:
        return False
    between = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    return time.time() - last < max(_LEAST_SECONDS_OF_LIFE, _NUM_LINES_OF_LIFE * between)


def _seconds_left(lines: Sequence[Mapping[str, Any]], last_step: int | None) -> float | None:
    trained = [line for line in lines if "train/loss" in line][-_NUM_LINES_OF_SPEED:]
    if last_step is None or len(trained) < 2:
        return None
    begin, end = (_value(line, "time") for line in (trained[0], trained[-1]))
    num_steps = trained[-1]["step"] - trained[0]["step"]
    if begin is None or end is None or num_steps <= 0:
        return None
    with suppress(OverflowError):
        seconds: float = (last_step - trained[-1]["step"]) * (end - begin) / num_steps
        return min(max(0.0, seconds), MOST_SECONDS)
    return None


def _seconds(
    start: Mapping[str, Any], end: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> float | None:
    begun, ended = seconds_of(start.get("time")), seconds_of(end.get("time"))
    if ended is None:
        ended = _last(lines, "time")
    return None if begun is None or ended is None else max(0.0, ended - begun)


def _last(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the value of a name in the last line that has one."""
    return next((value for line in reversed(lines) if (value := _value(line, name)) is not None), None)


def _evaluation(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of an evaluation."""
    names = (name for name in line if "/" in name)
    return {name: value for name in names if (value := _value(line, name)) is not None}


def _best(evaluated: Sequence[Mapping[str, Any]], start: Mapping[str, Any]) -> tuple[str, int, float] | None:
    name, mode = (text_of_start(start, "evaluate", key) for key in ("best", "best_mode"))
    if not name:
        return None
    values = [(line["step"], value) for line in evaluated if (value := _value(line, name)) is not None]
    choose = min if (mode or mode_by_name(name)) == "min" else max  # earlier versions noted no mode
    return (name, *choose(values, key=lambda evaluation: evaluation[1])) if values else None


def text_of_start(start: Mapping[str, Any], section: str, key: str) -> str:
    """Return a key of the configuration of a start; empty where it is no text."""
    config = start.get("config")
    of_section = config.get(section) if isinstance(config, dict) else None
    value = of_section.get(key) if isinstance(of_section, dict) else None
    return value if isinstance(value, str) else ""


def _devices(start: Mapping[str, Any]) -> str:
    devices = start.get("devices")
    return (
        " + ".join(f"{count} x {name}" for name, count in devices.items())
        if isinstance(devices, dict)
        else ""
    )


def _reducer(start: Mapping[str, Any]) -> str:
    devices = start.get("devices")
    counts = devices.values() if isinstance(devices, dict) else ()
    has_several = sum(count_of(count) or 0 for count in counts) > 1
    return text_of_start(start, "distributed", "reducer") if has_several else ""


def _next_command(run_dir: RunDir) -> str:
    with suppress(OSError):
        if any(run_dir.checkpoints.glob("step-*")):
            config, folder = (shlex.quote(str(path)) for path in (run_dir.config, run_dir.path))
            return f"lanewise train {config} --resume --train.run_dir {folder}"  # it may have been moved
    return ""


def _value(line: Mapping[str, Any], name: str) -> float | None:
    return finite(line.get(name))


def finite(value: object) -> float | None:
    """Return what may be anything as a float; None where it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None
