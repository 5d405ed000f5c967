"""Names the machine and the versions on which a speed depends, and compares with an earlier measurement."""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lanewise.commands.bench.job import LEAST_ROUNDS
from lanewise.commands.bench.rounds import rate
from lanewise.commands.bench.row import STEADY
from lanewise.config import RunConfig
from lanewise.errors import ConfigError
from lanewise.processes.device.accelerator import device_name
from lanewise.processes.device.choice import accelerator_type, count_accelerators

_FASTEST = 1e300
"""No row does more samples per second; a number of JSON may be one that no float can be."""


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores and the accelerators."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        processor = found[1] if found else processor
    kind = accelerator_type()
    devices = [device_name(torch.device(f"{kind}:{index}")) for index in range(count_accelerators())]
    return {"processor": processor, "cores": os.cpu_count(), "accelerators": devices}


def describe_work(config: RunConfig) -> dict[str, Any]:
    """Return what a step trains, as far as another value makes it another step."""
    return {
        "task": config.task.class_path,
        **asdict(config.batch),
        "precision": config.precision,
        "threads": config.distributed.threads,
    }


def describe_versions() -> dict[str, str]:
    """Return those of this library, of torch and of Python."""
    return {name: version(name) for name in ("lanewise", "torch")} | {"python": platform.python_version()}


class Change(NamedTuple):
    """A row that became faster or slower, or fails."""

    name: str
    before: float
    """How many samples per second it did."""
    after: float | None
    """How many it does now; None where it fails."""

    @property
    def is_slower(self) -> bool:
        """Whether it became slower, or fails."""
        return self.after is None or self.after < self.before

    def __str__(self) -> str:
        if self.after is None:
            return f"{self.name} fails: {rate(self.before)} samples/s before"
        word = "slower" if self.is_slower else "faster"
        return (
            f"{self.name} got {word}: {rate(self.after)} samples/s, {rate(self.before)} before "
            f"({self.after / self.before - 1:+.1%})"
        )


def require_comparable(before: Any, config: RunConfig) -> None:
    """Do nothing if an earlier measurement was of this machine and work.

    Args:
        before: what `--json` wrote.
        config: the run.

    Raises:
        ConfigError: it is something else, or of another machine or work.
    """
    with _reading(before):
        earlier, now = before["machine"] | before["work"], describe_machine() | describe_work(config)
        if differing := [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]:
            name = differing[0]
            raise ConfigError(
                f"--compare needs a measurement of the same machine and work: got {name} {earlier.get(name)} "
                f"before, and {now.get(name)} now. Measure the earlier version here."
            )
        list(compare(before, {"rows": []}))


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the rows that changed beyond their spread and by more than noise may be.

    Of rows with few rounds the spread is not known, so they are left out.

    Args:
        before: what `--json` wrote.
        after: the same of this measurement.
    """
    rows = {_key(row): _speed(row) for row in before["rows"]}
    for row in after["rows"]:
        old, new = rows.get(_key(row)), _speed(row)
        if old is None or (new is None and row["failure"] is None):
            continue
        if new is None or row["failure"] is not None:
            yield Change(row["name"], old["median"], None)
            continue
        apart = new["high"] < old["low"] or new["low"] > old["high"]
        if apart and abs(new["median"] / old["median"] - 1) > STEADY:
            yield Change(row["name"], old["median"], new["median"])


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["reducer"], row["num_devices"], row["equality"]


def _speed(row: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Return how fast a row was; None where that is not known."""
    speed: Mapping[str, float] | None = row["samples_per_second"]
    has_spread = row["num_rounds"] >= LEAST_ROUNDS
    if speed is None:
        return None
    if not 0 < speed["low"] <= speed["median"] <= speed["high"] < _FASTEST:
        raise ValueError("samples_per_second in order")
    return speed if has_spread else None


@contextmanager
def _reading(before: Any) -> Iterator[None]:
    """Say of anything else that it is not what `--json` wrote."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "--compare needs what an earlier `lanewise bench --json` wrote: got "
            f"{type(before).__name__} without {error}. Write it again."
        ) from None
