"""Whatever the bytes, the separator and the pieces are: the records are those of bytes.split."""

import random
import re
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lanewise.data import record_scan
from lanewise.data.byte_file import ByteFile
from lanewise.data.record_scan import find_records, scan_file

FEW_BYTES = st.lists(st.sampled_from([b"\n", b"\r", b"a", b"b"]), max_size=60).map(b"".join)
SEPARATORS = st.one_of(st.binary(min_size=1, max_size=3), FEW_BYTES.map(lambda data: data[:3] or b"\n"))


def split(data: bytes, separator: bytes) -> list[bytes]:
    records = data.split(separator)
    if separator == b"\n":
        records = [record.removesuffix(b"\r") for record in records]
    return [record for record in records if record]


def cut(data: bytes, offsets, separator: bytes) -> list[bytes]:
    """The records, by their offsets."""
    parts = [data[begin:end] for begin, end in pairwise(offsets)]
    firsts = [part.split(separator)[0] for part in parts]
    return [record.removesuffix(b"\r") for record in firsts] if separator == b"\n" else firsts


def check(data: bytes, entries, separator: bytes) -> None:
    """See that entries are those of the records."""
    assert entries["offset"][-1] == len(data)
    records = cut(data, entries["offset"], separator)
    assert records == split(data, separator)
    assert entries["checksum"].tolist() == [*map(zlib.crc32, records), 0]


def pieces_of(data: bytes, borders: list[int]) -> list[bytes]:
    """The pieces of a text between borders."""
    places = sorted({0, *(border % (len(data) + 1) for border in borders), len(data)})
    return [data[first:stop] for first, stop in pairwise(places)]


@given(st.one_of(st.binary(max_size=60), FEW_BYTES), SEPARATORS, st.lists(st.integers(0, 60), max_size=4))
@example(b"a\n\n\nb\n\n\n\nc\n\n\n\n\n", b"\n\n", [2, 3, 7])
@example(b"xababababax", b"aba", [4, 5, 6])
@example(b"\r\n\r\n\r\ra\r\n\r", b"\n", [1])
@example(b"\n\r", b"\n", [])
def test_the_records_are_those_of_split(data, separator, borders):
    check(data, np.concatenate(list(find_records(pieces_of(data, borders), separator))), separator)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 9])
def test_a_byte_order_mark_at_the_beginning_is_left_out(piece_bytes):
    data = b"\xef\xbb\xbf\na\n\xef\xbb\xbfb"
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    entries = np.concatenate([*find_records(pieces, b"\n")])
    assert entries["offset"].tolist() == [4, 6, len(data)]


def test_a_million_line_feeds_in_a_row_and_a_record_of_many_pieces():
    data = b"a" + b"\n" * 1_000_001 + b"b" * 1_000_000
    pieces = [data[first : first + 100] for first in range(0, len(data), 100)]
    entries = np.concatenate(list(find_records(pieces, b"\n\n")))
    assert entries["offset"].tolist() == [0, 1_000_001, len(data)]


LINES = [random.Random(number).randbytes(number % 7).hex() for number in range(1000)]


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"<|end|>", b"11"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 10, 4096, 2**22])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_in_pieces(tmp_path, monkeypatch, separator, piece_bytes, suffix):
    lines = LINES[:200] if piece_bytes < 10 else LINES
    data = separator.decode().join(lines).encode() + b"\r\n" * 3 + b"\r"
    path = tmp_path / f"a{suffix}"
    compress = zlib.compressobj(wbits=31)
    path.write_bytes(compress.compress(data) + compress.flush() if suffix else data)
    monkeypatch.setattr(record_scan, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(record_scan, "_AHEAD", 3)
    entries = np.concatenate(list(scan_file(ByteFile.find(str(path)), separator)))
    check(data, entries, separator)
    if separator != b"11":
        expected = {line for line in lines if line}
        records = cut(data, entries["offset"], separator)
        assert {record.decode().strip() for record in records} - {""} == expected
    assert re.search(re.escape(separator), data)
