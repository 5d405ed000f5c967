"""Tells whether two processes see the same dataset, by its length and a few samples."""

from typing import NamedTuple

from lanewise.data.digest import digest
from lanewise.data.file_dataset import FileDataset
from lanewise.data.reader import LaneReader
from lanewise.errors import noting


class Fingerprint(NamedTuple):
    """Equal for equal datasets; unequal for most others."""

    num_samples: int
    samples_digest: str
    """Hash of the first, the middle and the last sample, as epoch 0 reads them; for a `FileDataset`, its own
    fingerprint."""
    tables_digest: str = ""
    """Hash of the tables from which the order was made, such as the lengths of the samples."""


def fingerprint(reader: LaneReader, num_samples: int) -> Fingerprint:
    """Read three samples, each under its own random state, and hash them; ask a `FileDataset` instead."""
    if isinstance(reader.dataset, FileDataset):
        return Fingerprint(num_samples, reader.dataset.fingerprint())
    indices = sorted({0, num_samples // 2, num_samples - 1})
    of = f"eval dataset {reader.eval_dataset}" if reader.eval_dataset else "the training dataset"
    with noting(lambda: f"when samples {indices} of {of} were read, to compare the processes"):
        return Fingerprint(num_samples, digest(*(reader.read(0, (index,)) for index in indices)))
