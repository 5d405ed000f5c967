"""The content of a stored file, decompressed, read from its beginning to its end."""

import bz2
import io
import lzma
from collections.abc import Callable
from typing import IO, Any, Self, final

from fsspec.compression import compr

from lanewise.data.byte_file import ByteFile, unreadable
from lanewise.errors import DataError

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]  # then fsspec knows another way to read .zst, or ByteFile refuses it

_DECOMPRESSORS: dict[str | None, Callable[[], Any]] = {
    "bz2": bz2.BZ2Decompressor,
    "lzma": lzma.LZMADecompressor,
    "xz": lzma.LZMADecompressor,
}
if zstandard is not None:
    _DECOMPRESSORS["zstd"] = lambda: zstandard.ZstdDecompressor().decompressobj()
_PART_BYTES = 4 * 2**20
_INPUT_BYTES = 2**13
_BUFFER_BYTES = 2**20
"""A block may have 256 cursors, and a server takes about as long for a request as to send a megabyte."""


class DamagedContentError(DataError):
    """The content of a file cannot be decompressed, although the file itself can be read."""


@final
class FileContent:
    """The content of a file, read from its beginning on; a context that closes the file.

    Args:
        file: compressed or not.
        count: is called with the number of bytes of each read of the stored file.

    Raises:
        DataError: if it cannot be opened, or has changed.
    """

    def __init__(self, file: ByteFile, count: Callable[[int], None]) -> None:
        self._file = file
        self._stored = io.BufferedReader(file.stream(count), _BUFFER_BYTES)
        self._content: Any = None

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer only at the end.

        Raises:
            DamagedContentError: if they cannot be decompressed.
            DataError: if they cannot be read, or the file has changed.
        """
        if not self._file.is_remote:
            self._file.check()
        parts = []
        try:
            if self._content is None:  # what is no such file may be refused here already
                if new_decompressor := _DECOMPRESSORS.get(self._file.compression):
                    self._content = _Members(self._stored, new_decompressor)
                else:
                    self._content = compr[self._file.compression](self._stored, mode="r")
            while num_bytes and (part := self._content.read(min(num_bytes, _PART_BYTES))):
                parts.append(part)
                num_bytes -= len(part)
        except DataError:
            raise
        except Exception as error:  # of any compression
            raise DamagedContentError(*unreadable(self._file.path, error).args) from error
        return b"".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._content is not None:
            self._content.close()
        self._stored.close()


@final
class _Members:
    """Reads all members of a file; zeros may follow each.

    Python's readers of .bz2 and .xz end, without an error, where a member is damaged at its beginning, and
    fsspec's of .zst after the first one, or within one.
    """

    def __init__(self, stored: IO[bytes], new_decompressor: Callable[[], Any]) -> None:
        self._stored = stored
        self._new = new_decompressor
        self._member: Any = None
        self._unused = self._content = self._padding = b""

    def read(self, num_bytes: int) -> bytes:
        while not self._content:
            data = self._unused or self._stored.read(_INPUT_BYTES)
            if not data:
                if self._member is not None:
                    raise EOFError("it ends within a member")
                return b""
            if self._member is None and not (data := data.lstrip(self._padding)):
                self._unused = b""
                continue
            self._member = self._member or self._new()
            self._content, self._unused = self._member.decompress(data), self._member.unused_data
            if self._member.eof:
                self._member, self._padding = None, b"\0"
        part, self._content = self._content[:num_bytes], self._content[num_bytes:]
        return part

    def close(self) -> None:
        pass
