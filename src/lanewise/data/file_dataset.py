"""The base class of datasets of files, which know their size and count the bytes that they read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch.utils.data import Dataset

from lanewise.errors import DataError

OnError = Literal["raise", "skip"]
"""What a dataset does with samples that it cannot read."""


def check_arguments(on_error: Any, memory_mib: Any) -> None:
    """Check the arguments that several datasets share.

    Raises:
        DataError: if one has a value that it cannot have.
    """
    if on_error not in get_args(OnError):
        raise DataError(f"on_error is {on_error!r}. It can be {' or '.join(get_args(OnError))}.")
    if not isinstance(memory_mib, int | float) or not 0 < memory_mib < float("inf"):
        raise DataError(f"memory_mib is {memory_mib!r}. It is a number of MiB above 0, such as 256.")


class FileDataset(Dataset[Any], ABC):
    """A map-style dataset whose samples lie in files that do not change.

    `__getitems__` reads the samples of a micro-batch together; with `on_error="skip"` it leaves out those
    that cannot be read. If the samples lie in blocks that are cheapest to read as a whole, such as the row
    groups of Parquet, the dataset also has `block_sizes() -> Sequence[int]`, which returns the number of
    consecutive samples in each block. `data.order` is then `blocked` by default.

    A format is a subclass in a file of its own, which `_MODULES` of `lanewise.data` names.
    """

    reads_from_start: bool = False
    """Whether a block can only be read from its start, by each lane that needs a part of it."""
    read_bytes: int = 0
    """Bytes that this copy of the dataset has read from its files, without indexes and footers."""
    num_skipped: int = 0
    """Samples that this copy has left out, as they could not be read."""

    def _count(self, num_bytes: int) -> None:
        self.read_bytes += num_bytes

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes in the files of all samples, as they are stored, of the columns that are read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that is equal for equal datasets, without reading a sample.

        Processes compare it, also on different machines: it follows from the sizes, footers and indexes of
        the files, and not from their paths.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        """Read several samples.

        Raises:
            DataError: if one cannot be read, and `on_error` is not `skip`.
        """

    def __getitem__(self, index: int) -> Any:
        """Read one sample.

        Raises:
            DataError: if it cannot be read, also where `on_error` is `skip`.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        samples = self.__getitems__([index % len(self)])
        if not len(samples):
            raise DataError(
                f"sample {index} cannot be read, and is left out. Ask for several samples at once."
            )
        return samples[0]
