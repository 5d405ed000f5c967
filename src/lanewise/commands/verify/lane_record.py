"""What the lines of an audit say: what a lane was given in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_LANES = 2**20
"""An audit with more lanes is not read."""


@dataclass(frozen=True)
class LaneRecord:
    """What one lane was given in a step."""

    indices: tuple[int, ...]
    """Dataset indices; of a stream the numbers of the samples in the epoch, of the lane or of all lanes."""
    tensors: str
    """Hash of the tensors."""
    num_rows: int | None
    """First dimension that all of them have; None if they have none in common."""
    num_skipped: int
    """Samples that could not be read, and were left out."""
    file: str
    """Name of the file that says so, which names the rank."""
    epoch: int | None = None
    """The epoch, from 1; None where the samples come from no stream."""
    present: tuple[int, ...] | None = None
    """The lanes of a stream that have samples in the step; None where all do."""
    upcoming: tuple[int, ...] = ()
    """How many samples each lane of the rank has in the next step of a stream; in the rank's last record."""

    @property
    def num_samples(self) -> int:
        """Samples that were read."""
        return len(self.indices) - self.num_skipped

    @classmethod
    def from_line(cls, line: Mapping[str, Any], file: str) -> "LaneRecord":
        """Read a line of a rank's file."""
        indices, rows = tuple(map(count, line["indices"])), line.get("rows")
        num_rows = None if rows is None else count(rows)
        epoch, present = line.get("epoch"), line.get("present")
        return cls(
            indices,
            str(line["tensors"]),
            num_rows,
            count(line["skipped"]),
            file,
            None if epoch is None else count(epoch),
            None if present is None else tuple(map(count, present)),
            tuple(map(count, line.get("upcoming", ()))),
        )


Lanes: TypeAlias = Mapping[int, Sequence[LaneRecord]]
"""What the lanes of a step were given."""


def count(value: object) -> int:
    """Return a value that must be a whole number of at least 0.

    Raises:
        TypeError: if it is not.
    """
    if type(value) is int and value >= 0:
        return value
    raise TypeError(f"{value!r:.60} is no count")
