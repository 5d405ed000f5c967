"""Tells whether two processes see the same dataset, by its length and a few samples."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lanewise.data.digest import digest
from lanewise.data.file_dataset import FileDataset
from lanewise.data.lane_reader import LaneReader
from lanewise.errors import TaskError, noting


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
        return Fingerprint(num_samples, digest(*(_read(reader, index, of) for index in indices)))


def _read(reader: LaneReader, index: int, of: str) -> Sequence[Any]:
    """Read a sample.

    Raises:
        TaskError: if the dataset cannot be read by index, as one that is read by key.
    """
    try:
        return reader.read(0, (index,))
    except (KeyError, NotImplementedError) as error:
        is_by_key = error.args == (index,) or isinstance(reader.dataset, Mapping)
        if isinstance(error, KeyError) and not is_by_key:
            raise
        raise TaskError(
            f"{of} is a {type(reader.dataset).__name__}, which has no sample {index}: {error!r}. Lanes read "
            "samples by index, from 0 on: give it __getitem__(index)."
        ) from error
