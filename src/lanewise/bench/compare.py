"""Compares a measurement with an earlier one of the same machine."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lanewise.bench.row import STEADY
from lanewise.errors import ConfigError


class Change(NamedTuple):
    """A row that became faster or slower."""

    name: str
    before: float
    after: float
    """Both in samples per second."""

    @property
    def is_slower(self) -> bool:
        """Whether it became slower."""
        return self.after < self.before

    def __str__(self) -> str:
        word = "slower" if self.is_slower else "faster"
        return (
            f"{self.name} got {word}: {self.after:,.4g} samples/s, {self.before:,.4g} before "
            f"({self.after / self.before - 1:+.1%})"
        )


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the rows that changed beyond their spread and by more than noise may be.

    Args:
        before: what `--json` wrote.
        after: the same of this measurement.

    Raises:
        ConfigError: if `before` is something else, or of another machine or work.
    """
    try:
        for key in ("machine", "work"):
            _require_equal(before[key], after[key])
        rows = {_key(row): row["samples_per_second"] for row in before["rows"]}
        for row in after["rows"]:
            old, new = rows.get(_key(row)), row["samples_per_second"]
            if old is None or new is None:
                continue
            apart = new["high"] < old["low"] or new["low"] > old["high"]
            if apart and abs(new["median"] / old["median"] - 1) > STEADY:
                yield Change(row["name"], old["median"], new["median"])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"--compare needs what an earlier `lanewise bench --json` wrote: it lacks {error}. Write it anew."
        ) from None


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["reducer"], row["num_devices"], row["equality"]


def _require_equal(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"--compare needs a measurement of the same machine and work: got {name} {before.get(name)} "
            f"before, and {after.get(name)} now. Measure the earlier version here."
        )
