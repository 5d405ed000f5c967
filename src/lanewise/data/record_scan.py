"""Finds where the records of a text begin, in pieces of it, and the checksum of each."""

from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lanewise.data.byte_file import ByteFile
from lanewise.data.file_content import FileContent

Offsets = NDArray[np.int64]
Entries = NDArray[np.void]
ENTRY = np.dtype([("offset", "<i8"), ("checksum", "<u4")])
"""Where a record begins, and its CRC-32 without the separator. The last entry is the end of the text."""

_PIECE_BYTES = 4 * 2**20
_AHEAD = 8
"""Pieces of a file that are read in parallel, and held, before the first of them is searched."""


def scan_file(file: ByteFile, separator: bytes) -> Iterator[Entries]:
    """Yield the records of a file, in parts, as `find_records` does.

    Args:
        file: its ranges are read in parallel; a compressed file is read from its beginning to its end.
        separator: at least one byte.

    Raises:
        DataError: if the file cannot be read, or has changed.
    """
    if file.compression:
        with FileContent(file, lambda _: None) as content:
            yield from find_records(iter(lambda: content.read(_PIECE_BYTES), b""), separator)
    else:
        yield from find_records(_read_ahead(file), separator)


def find_records(pieces: Iterable[bytes], separator: bytes) -> Iterator[Entries]:
    """Yield the records of a text, in parts: n + 1 entries for n records.

    Record i begins at offset i. Its separator and any empty records follow it, and end at offset i + 1, which
    is the end of the text for the last record. The records are those of `bytes.split`; if the separator is a
    line feed, without a carriage return at their end. An empty one is left out, and so is a byte order mark
    at the beginning of the text.

    Args:
        pieces: the whole text, in order.
        separator: at least one byte.
    """
    text = bytearray()
    """The text after the last separator, as far as it was read."""
    begin = num_searched = 0
    for piece in pieces:
        text += piece
        if not begin and text.startswith(BOM_UTF8):
            text, begin, num_searched = text[len(BOM_UTF8) :], len(BOM_UTF8), 0
        if text.find(separator, num_searched) < 0:
            num_searched = max(0, len(text) - len(separator) + 1)
            continue
        *records, rest = bytes(text).split(separator)
        yield _entries(records, begin, separator)
        begin += len(text) - len(rest)
        text, num_searched = bytearray(rest), 0
    if text:
        yield _entries([bytes(text)], begin, separator)
    yield np.array([(begin + len(text), 0)], ENTRY)


def _entries(records: list[bytes], begin: int, separator: bytes) -> Entries:
    """Return the entries of those records that are not empty; the first one begins at `begin`."""
    sizes = np.fromiter(map(len, records), np.int64, len(records)) + len(separator)
    if separator == b"\n":
        records = [record.removesuffix(b"\r") for record in records]
    entries = np.empty(len(records), ENTRY)
    entries["offset"] = begin + np.cumsum(sizes) - sizes
    entries["checksum"] = np.fromiter(map(crc32, records), np.uint32, len(records))
    return entries[np.fromiter(map(bool, records), np.bool_, len(records))]


def _read_ahead(file: ByteFile) -> Iterator[bytes]:
    opened = file.open()
    if file.size <= _PIECE_BYTES:  # threads would take longer to start
        yield from opened.read([(0, file.size)])
        return
    pending: deque[Future[list[bytes]]] = deque()
    with ThreadPoolExecutor(_AHEAD) as pool:
        for begin in range(0, file.size, _PIECE_BYTES):
            pending.append(pool.submit(opened.read, [(begin, min(begin + _PIECE_BYTES, file.size))]))
            if len(pending) == _AHEAD:
                yield from pending.popleft().result()
        for following in pending:
            yield from following.result()
