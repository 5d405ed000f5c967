"""A compressed file is read from front to end; what is damaged is an error."""

import bz2
import gzip
import lzma

import fsspec
import pytest

from lanewise.data.byte_file import ByteFile
from lanewise.data.file_content import FileContent
from lanewise.errors import DataError

zstandard = pytest.importorskip("zstandard")

DATA = bytes(range(256)) * 400
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, "": bytes}


def ignore(num_bytes):
    pass


def find(tmp_path, suffix, data):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    return ByteFile.find(str(path))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_content_in_parts(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("lanewise.data.file_content._PART_BYTES", 1000)
    compress = COMPRESS[suffix]
    file = find(tmp_path, suffix, compress(DATA[:50_000]) + compress(DATA[50_000:]))  # in two members
    read = []
    with FileContent(file, read.append) as content:
        assert read == []
        assert [content.read(size) for size in (0, 5, 60_000)] == [b"", DATA[:5], DATA[5:60_005]]
        assert content.read(10**9) == DATA[60_005:]
        assert content.read(1) == b""
    assert sum(read) == file.size


def test_no_more_than_a_buffer_is_read_ahead(tmp_path):
    file, read = find(tmp_path, "", DATA * 30), []
    with FileContent(file, read.append) as content:
        content.read(1)
    assert sum(read) == 2**20 < file.size


def test_zst_in_several_frames(tmp_path):
    compressed = zstandard.compress(DATA) + zstandard.compress(b"more")
    with FileContent(find(tmp_path, ".zst", compressed), ignore) as content:
        assert content.read(len(DATA) - 1) == DATA[:-1]
        assert content.read(10**9) == DATA[-1:] + b"more"
    for damaged in (compressed[:-3], compressed + b"x"):
        content = FileContent(find(tmp_path, ".zst", damaged), ignore)
        with content, pytest.raises(DataError, match="cannot be read"):
            content.read(10**9)


def test_remote_content():
    fsspec.filesystem("memory").pipe_file("/file_content/a.gz", gzip.compress(DATA))
    with FileContent(ByteFile.find("memory://file_content/a.gz"), ignore) as content:
        assert content.read(10**9) == DATA


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (".gz", lambda data: data[:-100], "cannot be read: EOFError"),
        (".gz", lambda _: b"not gzip", "cannot be read: BadGzipFile: Not a gzipped file"),
        (".gz", lambda data: data + b"rest", "cannot be read: BadGzipFile"),
        (".bz2", lambda data: b"x" + data, "cannot be read: OSError: Invalid data stream"),
        (".xz", lambda data: data[:50] + b"xxxx" + data[54:], "cannot be read: LZMAError"),
    ],
)
def test_damaged_content_is_an_error(tmp_path, suffix, damage, message):
    file = find(tmp_path, suffix, damage(COMPRESS[suffix](DATA)))
    with FileContent(file, ignore) as content, pytest.raises(DataError, match=message):
        content.read(10**9)


@pytest.mark.parametrize(("suffix", "reason"), [(".bz2", "OSError"), (".xz", "LZMAError")])
@pytest.mark.parametrize("at", [0, 15])
def test_a_damaged_second_member_is_an_error(tmp_path, suffix, reason, at):
    """Python's readers took one whose beginning is damaged for the end, and its records were lost."""
    member = COMPRESS[suffix](DATA)
    second = bytearray(member)
    second[at] ^= 0xFF
    with FileContent(find(tmp_path, suffix, member + second), ignore) as content:
        assert content.read(len(DATA)) == DATA
        with pytest.raises(DataError, match=rf"a\{suffix} cannot be read: {reason}"):
            content.read(10**9)


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".zst"])
def test_zeros_after_a_member_are_no_member(tmp_path, suffix):
    """The format of .xz allows them, and a tape adds them; the members after them count."""
    member = (COMPRESS | {".zst": zstandard.compress})[suffix](DATA)
    padded = member + bytes(20_000) + member + bytes(4)
    with FileContent(find(tmp_path, suffix, padded), ignore) as content:
        assert content.read(10**9) == DATA * 2


def test_a_file_that_changes_is_an_error(tmp_path):
    file = find(tmp_path, "", DATA)
    with FileContent(file, ignore) as content:
        content.read(10)
        find(tmp_path, "", DATA + b"1")
        with pytest.raises(DataError, match="has changed"):
            content.read(10)
    with pytest.raises(DataError, match="has changed"):
        FileContent(file, ignore)
