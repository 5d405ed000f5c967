"""Windows of files of tokens as samples."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from lanewise.data.byte_file import MAX_OPEN, ByteFile, LocalBytes, unreadable
from lanewise.data.file_dataset import FileDataset
from lanewise.data.source_file import Paths, is_remote, list_files
from lanewise.errors import DataError

logger = logging.getLogger(__name__)


@final
class TokenDataset(FileDataset):
    """A dataset of windows of tokens, which lie in files as flat arrays, mapped into memory.

    A sample is int64 [window + 1]: its first `window` tokens are the inputs, its last `window` the targets.
    No window crosses the border of a file. Tokens at the end of a file that fill no window are left out.

    Args:
        paths: a path, a pattern such as `data/*.bin`, or several of them. The files hold nothing but numbers
            in the machine's byte order, as nanoGPT writes them, or are `.npy` files of 1-d arrays.
        window: the number of tokens that a model sees at once.
        stride: the number of tokens from the start of a window to the start of the next one; None stands for
            `window`, so that each token is a target once.
        dtype: numpy's name of the integers in the files; a `.npy` file names its own. None stands for
            `uint16`, and for an error where the first tokens look like longer ones.

    Raises:
        DataError: if there is no file, or one is shorter than a window, or does not hold such an array.
    """

    def __init__(
        self, paths: Paths, *, window: int, stride: int | None = None, dtype: str | None = None
    ) -> None:
        stride = window if stride is None else stride
        if window < 1 or stride < 1:
            raise DataError(f"window is {window} and stride is {stride}; both are at least 1 token.")
        self._window = window
        self._stride = stride
        self._files = [_TokenFile.find(path, dtype) for path in list_files(paths)]
        self._first = np.cumsum([0, *(self._num_windows(file) for file in self._files)])
        """[number of files + 1]: the first sample of each file, and the number of all samples."""
        self._say_what_is_left_out()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(token_file.file.size for token_file in self._files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def fingerprint(self) -> str:
        """Return the size and the stride of the windows, and the number of tokens in each file."""
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
            opened, windows = _open_windows(self._files[number], self._window, self._stride)
            opened.check()  # a read beyond the end of a mapped file would kill the process
            rows = np.flatnonzero(numbers == number)
            tokens[rows] = windows[wanted[rows] - self._first[number]]
            self.read_bytes += len(rows) * (self._window + 1) * windows.itemsize
        return torch.from_numpy(tokens).unbind()

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
            text = "%s of %s tokens are left out, as they fill no window of %s + 1 at the end of a file"
            logger.info(text, f"{left_out:,}", f"{num_tokens.sum():,}", f"{self._window:,}")


class _TokenFile(NamedTuple):
    file: ByteFile
    dtype: str
    """The type of a token with its byte order, as numpy writes it."""
    begin: int
    """Byte at which the tokens begin."""
    num_tokens: int

    @classmethod
    def find(cls, path: str, dtype: str | None) -> "_TokenFile":
        file = ByteFile.find(path)
        if is_remote(file.path) or file.compression:
            raise DataError(f"{path} cannot be mapped into memory. Copy it to a disk, not compressed.")
        path = file.path
        if path.endswith(".npy"):
            try:
                array = np.lib.format.open_memmap(path, mode="r")
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error
            if array.ndim != 1:
                raise DataError(f"{path} is an array of shape {list(array.shape)}. Write it as a 1-d array.")
            stored, begin, num_bytes = array.dtype, array.offset, array.nbytes
        else:
            try:
                stored, begin, num_bytes = np.dtype(dtype or "uint16"), 0, file.size
            except TypeError as error:
                raise DataError(f"dtype is {dtype!r}, which numpy doesn't know, unlike 'uint16'.") from error
            first = np.fromfile(path, np.uint16, 0 if dtype else 4096).astype(np.int64)
            if len(first) > 63 and 256 * first[1::2].max() < first[::2].max():
                raise DataError(
                    f"{path} seems to hold tokens of 4 bytes, and dtype is 'uint16', the default. Give the "
                    "dtype with which it was written, as in dtype='uint32', or 'uint16' if that is right."
                )
        if stored.kind not in "iu":
            raise DataError(f"{path} holds {stored.name}, it seems. Tokens are integers, such as 'uint16'.")
        num_tokens, rest = divmod(num_bytes, stored.itemsize)
        if rest:
            raise DataError(
                f"{path} has {num_bytes:,} bytes, no multiple of the {stored.itemsize} of {stored.name}. "
                "Give the dtype with which it was written, or write it again."
            )
        return cls(file, stored.str, begin, num_tokens)


@lru_cache(maxsize=MAX_OPEN)
def _open_windows(tokens: _TokenFile, window: int, stride: int) -> tuple[LocalBytes, NDArray[Any]]:
    """Open a file, and return it with its windows, [number of windows, window + 1], which overlap."""
    opened = LocalBytes(tokens.file)
    mapped = np.memmap(tokens.file.path, tokens.dtype, "r", tokens.begin, (tokens.num_tokens,))
    return opened, np.lib.stride_tricks.sliding_window_view(mapped, window + 1)[::stride]
