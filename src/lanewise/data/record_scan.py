"""Finds where the records of a text begin, in pieces of it, and the checksum of each."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lanewise.data.byte_file import ByteFile, OpenBytes
from lanewise.data.file_content import FileContent

Offsets = NDArray[np.int64]
Entries = NDArray[np.void]
ENTRY = np.dtype([("offset", "<i8"), ("checksum", "<u4")])
"""Where a record begins, and the CRC-32 of it without its separator. The last one is the end of the text."""

_PIECE_BYTES = 4 * 2**20
"""Enough that Python's own work does not count, and little enough for a processor's cache."""
_AHEAD = 8
"""Pieces of a file that are searched, and held, before the first of them is used."""


class Separators(NamedTuple):
    """Where separators were found in a piece of a text, ascending; they may overlap each other."""

    begins: Offsets
    """Bytes from the begin of the text to the first byte of each."""
    after_return: NDArray[np.bool_]
    """Whether a carriage return stands before each, and the separator is a line feed."""


class Piece(NamedTuple):
    """A piece of a text, which follows the one before."""

    text: bytes
    separators: Separators
    """What was found in the pieces so far, and not told before."""


def scan_file(file: ByteFile, separator: bytes, pool: Executor) -> Iterator[Entries]:
    """Yield the records of a file, in parts, as `find_records` does.

    Args:
        file: its ranges are searched in parallel; a compressed one is read from front to end.
        separator: at least one byte.
        pool: searches the ranges.

    Raises:
        DataError: if the file cannot be read, or has changed.
    """
    if file.compression:
        with FileContent(file, lambda _: None) as content:
            yield from find_records(_search_content(content, separator), separator)
    else:
        yield from find_records(_search_ranges(file, separator, pool), separator)


def find_records(pieces: Iterable[Piece], separator: bytes) -> Iterator[Entries]:
    """Yield the records of a text, in parts: n + 1 entries for n records.

    Record i begins at offset i. Its separator follows it, and the empty records after it; all of that ends
    at offset i + 1, the last one at the end of the text. A record is what `bytes.split` gives, without a
    carriage return at its end where lines are separated; if nothing is left, it is empty, and left out.

    Args:
        pieces: the whole text, in order; at last a piece that has a separator at the end of the text, whether
            there is one or not.
        separator: at least one byte.
    """
    begin = end = base = 0
    parts: list[bytes] = []
    """The text from `base` on, as far as it was read: no record before has more of it."""
    for piece in pieces:
        parts.append(piece.text)
        found = _without_overlaps(piece.separators, begin, len(separator))
        if not len(found.begins):
            continue
        text = b"".join(parts)
        after, ends = found.begins + len(separator), found.begins - found.after_return
        begins = np.concatenate([np.array([begin]), after[:-1]])
        is_record = ends > begins
        begins, ends = begins[is_record], ends[is_record]
        bounds = zip((begins - base).tolist(), (ends - base).tolist(), strict=True)
        entries = np.empty(len(begins), ENTRY)
        entries["offset"] = begins
        entries["checksum"] = [crc32(text[first:stop]) for first, stop in bounds]
        yield entries
        begin, end = int(after[-1]), int(found.begins[-1])
        parts = [text[begin - base :]]
        base = min(begin, base + len(text))
    yield np.array([(end, 0)], ENTRY)


def find_separators(data: bytes, base: int, first: int, stop: int, separator: bytes) -> Separators:
    """Find the separators that begin in bytes `first` to `stop - 1` of a text.

    Args:
        data: a part of the text, which holds these separators whole, and one byte before `first`, if there
            is one.
        base: where `data` begins in the text.
        first: where the first separator may begin.
        stop: where no separator may begin any more.
        separator: at least one byte.
    """
    values = np.frombuffer(data, np.uint8)
    # Numpy releases the interpreter's lock in both: 1.8 GB/s a thread.
    at = np.flatnonzero(values[first - base : max(stop, first) - base] == separator[0]) + (first - base)
    for place, value in enumerate(separator[1:], start=1):
        at = at[values[at + place] == value]
    if separator == b"\n":
        # At byte 0 it tells something wrong, which changes nothing: the record before it is empty anyway.
        after_return = values[at - 1] == ord("\r")
    else:
        after_return = np.zeros(len(at), np.bool_)
    return Separators(at + base, after_return)


def _without_overlaps(found: Separators, begin: int, length: int) -> Separators:
    """Return the separators that are left, from `begin` on, when each takes its bytes from those after it."""
    if length == 1:
        return found
    keep = found.begins >= begin
    begins, after_return = found.begins[keep], found.after_return[keep]
    gaps = np.diff(begins)
    if not len(gaps) or gaps.min() >= length:
        return Separators(begins, after_return)
    # Which one follows each that is taken; the last entry stands for the end.
    following = np.append(np.searchsorted(begins, begins + length), len(begins))
    # One that overlaps none before it is taken. The others are reached from those, in 1, 2, 4, ... steps at
    # once: a file may hold a million line feeds in a row.
    taken = np.concatenate([[True], gaps >= length, [False]])
    while True:
        reached = taken.copy()
        reached[following[taken]] = True
        if np.array_equal(reached[:-1], taken[:-1]):
            return Separators(begins[taken[:-1]], after_return[taken[:-1]])
        taken, following = reached, following[following]


def _search_ranges(file: ByteFile, separator: bytes, pool: Executor) -> Iterator[Piece]:
    opened = file.open()
    pending: deque[Future[Piece]] = deque()
    for begin in range(0, file.size, _PIECE_BYTES):
        pending.append(pool.submit(_search_range, opened, file.size, begin, separator))
        if len(pending) == _AHEAD:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
    (last,) = opened.read([(file.size - 1, file.size)])
    yield _end_of_text(file.size, last, separator)


def _search_range(opened: OpenBytes, size: int, begin: int, separator: bytes) -> Piece:
    base, over, end = max(0, begin - 1), len(separator) - 1, min(begin + _PIECE_BYTES, size)
    (data,) = opened.read([(base, min(end + over, size))])
    found = find_separators(data, base, begin, min(end, size - over), separator)
    return Piece(data[begin - base : end - base], found)


def _search_content(content: FileContent, separator: bytes) -> Iterator[Piece]:
    data, base, first = b"", 0, 0
    while True:
        read = content.read(_PIECE_BYTES)
        if not read:
            yield _end_of_text(base + len(data), data[-1:], separator)
            return
        data += read
        stop = max(first, base + len(data) - len(separator) + 1)
        yield Piece(read, find_separators(data, base, first, stop, separator))
        kept = min(len(data), len(separator))  # what the next separator may begin with, and a byte before it
        data, base, first = data[-kept:], base + len(data) - kept, stop


def _end_of_text(size: int, last: bytes, separator: bytes) -> Piece:
    return Piece(b"", Separators(np.array([size]), np.array([separator == b"\n" and last == b"\r"])))
