"""Windows of files of tokens as samples."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lanewise.data.byte_file import ByteFile, LocalBytes, unreadable
from lanewise.data.file_dataset import FileDataset
from lanewise.data.open_files import OpenFiles
from lanewise.data.source_file import Paths, list_files
from lanewise.errors import DataError

logger = logging.getLogger(__name__)


class TokenDataset(FileDataset):
    """A dataset of windows of tokens, which lie in files as flat arrays, mapped into memory.

    A sample is int64 [window + 1]: its first `window` tokens are inputs, its last `window` their targets. No
    window crosses the border of a file; the tokens at the end of a file that fill none are left out.

    Args:
        paths: a path, a pattern such as `data/*.bin`, or several of them; files of numbers in the machine's
            byte order with nothing besides, as nanoGPT writes them, or `.npy` of 1-d arrays.
        window: tokens that a model sees at once.
        stride: tokens from the begin of a window to the begin of the next one; None: `window`, so that each
            token is a target once.
        dtype: numpy's name of the integers in the files; a `.npy` names its own.

    Raises:
        DataError: if there is no file, or one is too short for a window, or is no such array.
    """

    def __init__(
        self, paths: Paths, *, window: int, stride: int | None = None, dtype: str = "uint16"
    ) -> None:
        stride = window if stride is None else stride
        if window < 1 or stride < 1:
            raise DataError(f"window is {window} and stride is {stride}; both are at least 1 token.")
        self._window = window
        self._stride = stride
        self._files = [_TokenFile.find(path, dtype) for path in list_files(paths)]
        self._first = np.cumsum([0, *(self._num_windows(file) for file in self._files)])
        """[number of files + 1]: the first sample of each file, and the number of all samples."""
        self._open: OpenFiles[tuple[LocalBytes, NDArray[Any]]] = OpenFiles()
        self._say_what_is_left_out()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(token_file.file.size for token_file in self._files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def fingerprint(self) -> str:
        """Return what the windows are, and of how many tokens each file is."""
        files = ", ".join(f"{file.num_tokens} {file.dtype}" for file in self._files)
        return f"windows of {self._window} every {self._stride} of {files} tokens"

    def __getitems__(self, indices: list[int]) -> Sequence[torch.Tensor]:
        """Read several windows: the rows of one tensor.

        Raises:
            DataError: if a file has changed.
        """
        wanted = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._first, wanted, side="right") - 1
        tokens = np.empty((len(wanted), self._window + 1), np.int64)
        for number in np.unique(numbers).tolist():
            opened, windows = self._open.get(number, partial(self._map, number))
            opened.check()  # to read behind the end of a mapped file would kill the process
            rows = np.flatnonzero(numbers == number)
            tokens[rows] = windows[wanted[rows] - self._first[number]]
            self.read_bytes += len(rows) * (self._window + 1) * windows.itemsize
        return torch.from_numpy(tokens).unbind()

    def _map(self, number: int) -> tuple[LocalBytes, NDArray[Any]]:
        """Open a file, and return it with its windows, [number of windows, window + 1], which overlap."""
        file = self._files[number]
        opened = LocalBytes(file.file)
        mapped = np.memmap(file.file.path, file.dtype, "r", file.begin, (file.num_tokens,))
        windows = np.lib.stride_tricks.sliding_window_view(mapped, self._window + 1)[:: self._stride]
        return opened, windows

    def _num_windows(self, token_file: "_TokenFile") -> int:
        num_tokens = token_file.num_tokens
        if num_tokens <= self._window:
            raise DataError(
                f"{token_file.file.path} has {num_tokens:,} tokens, and a window with its targets takes "
                f"{self._window + 1:,}. Give a smaller window, or leave the file out."
            )
        return (num_tokens - self._window - 1) // self._stride + 1

    def _say_what_is_left_out(self) -> None:
        read = (np.diff(self._first) - 1) * self._stride + self._window + 1
        num_tokens = np.array([file.num_tokens for file in self._files])
        if left_out := int((num_tokens - read).sum()):
            logger.info(
                "%s of %s tokens are left out, as they fill no window of %s + 1 at the end of a file",
                f"{left_out:,}",
                f"{num_tokens.sum():,}",
                f"{self._window:,}",
            )


class _TokenFile(NamedTuple):
    file: ByteFile
    dtype: str
    """With its byte order, as numpy writes it."""
    begin: int
    """Byte at which the tokens begin."""
    num_tokens: int

    @classmethod
    def find(cls, path: str, dtype: str) -> "_TokenFile":
        file = ByteFile.find(path)
        if file.is_remote or file.compression:
            raise DataError(f"{path} cannot be mapped into memory. Copy it to a disk, not compressed.")
        return cls._of_npy(file) if path.endswith(".npy") else cls._of_binary(file, dtype)

    @classmethod
    def _of_npy(cls, file: ByteFile) -> "_TokenFile":
        try:
            array = np.lib.format.open_memmap(file.path, mode="r")
        except (OSError, ValueError) as error:
            raise unreadable(file.path, error) from error
        if array.ndim != 1:
            raise DataError(f"{file.path} is an array of shape {list(array.shape)}. Write it as a 1-d array.")
        _check_integers(file.path, array.dtype)
        return cls(file, array.dtype.str, array.offset, len(array))

    @classmethod
    def _of_binary(cls, file: ByteFile, dtype: str) -> "_TokenFile":
        try:
            known = np.dtype(dtype)
        except TypeError as error:
            raise DataError(f"dtype is {dtype!r}, which numpy doesn't know, unlike 'uint16'.") from error
        _check_integers(file.path, known)
        num_tokens, rest = divmod(file.size, known.itemsize)
        if rest:
            raise DataError(
                f"{file.path} has {file.size:,} bytes, no multiple of the {known.itemsize} of {known.name}. "
                "Give the dtype with which it was written, or write it again."
            )
        return cls(file, known.str, 0, num_tokens)


def _check_integers(path: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "iu":
        raise DataError(f"{path} holds {dtype.name}, it seems. Tokens are integers, such as 'uint16'.")
