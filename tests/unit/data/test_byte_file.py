"""Ranges of a file are read whole, and a file that changes is an error."""

import gc
import gzip
import io
import os
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fsspec
import pytest

from lanewise.data.byte_file import MAX_OPEN, ByteFile, open_bytes
from lanewise.errors import DataError


def rewrite(path, data, *, seconds=0):
    path.write_bytes(data)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + int(seconds * 1e9)))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(100)))
    return path


def tar_of(folder, files):
    """Write a compressed archive, and return its URL."""
    with tarfile.open(folder / "all.tar.gz", "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return f"file://{folder}/all.tar.gz"


def test_ranges_of_a_local_file(path):
    file = ByteFile.find(str(path))
    assert file.size == 100
    assert file.stamp == path.stat().st_mtime_ns
    assert file.open().read([(0, 3), (98, 100), (5, 5)]) == [b"\0\1\2", b"bc", b""]


def test_a_range_that_comes_in_parts(path, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: pread(fd, min(count, 7), offset))
    assert ByteFile.find(str(path)).open().read([(3, 60)]) == [bytes(range(3, 60))]


def test_ranges_of_a_remote_file():
    fsspec.filesystem("memory").pipe_file("/byte_file/a.bin", bytes(range(100)))
    file = ByteFile.find("memory://byte_file/a.bin")
    assert file.size == 100
    assert file.open().read([(0, 3), (98, 100)]) == [b"\0\1\2", b"bc"]


def test_a_file_is_closed_when_nothing_refers_to_it(path):
    opened = ByteFile.find(str(path)).open()
    descriptor = opened.descriptor
    os.fstat(descriptor)
    del opened
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that were opened, in order."""
    names, os_open = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args: names.append(path.rpartition("/")[2]) or os_open(path, *args)
    )
    return names


def test_files_that_were_used_last_stay_open(tmp_path, opened):
    files = []
    for number in range(MAX_OPEN + 1):
        (tmp_path / str(number)).write_text(str(number))
        files.append(ByteFile.find(str(tmp_path / str(number))))

    def read(number):
        assert open_bytes(files[number]).read([(0, files[number].size)]) == [str(number).encode()]

    for number in (*range(MAX_OPEN), 0, MAX_OPEN):
        read(number)
    assert opened == [str(number) for number in range(MAX_OPEN + 1)]
    read(0)
    read(1)
    assert opened[MAX_OPEN + 1 :] == ["1"]


def test_another_process_opens_its_own(path, opened, monkeypatch):
    file = ByteFile.find(str(path))
    ours = open_bytes(file)
    assert open_bytes(ByteFile.find(str(path))) is ours
    monkeypatch.setattr(os, "getpid", lambda: -2)
    assert open_bytes(file) is not ours
    assert opened == ["a.bin", "a.bin"]


@pytest.mark.parametrize("data", [b"longer" * 100, bytes(range(100)), b"short"])
def test_a_local_file_that_changes_is_an_error_when_it_is_read_and_when_it_is_opened(path, data):
    file = ByteFile.find(str(path))
    opened = file.open()
    rewrite(path, data, seconds=1)
    message = rf"a\.bin has changed.*100 bytes, and has {len(data)} now"
    with pytest.raises(DataError, match=message):
        opened.read([(0, 3)])
    with pytest.raises(DataError, match=message):
        file.open()


def test_a_remote_file_that_changes_is_an_error():
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/byte_file/b.bin", b"123456")
    file = ByteFile.find("memory://byte_file/b.bin")
    opened = file.open()
    memory.pipe_file("/byte_file/b.bin", b"123")
    with pytest.raises(DataError, match=r"memory://byte_file/b\.bin gave 3 bytes where bytes 0 to 6"):
        opened.read([(0, 6)])
    memory.pipe_file("/byte_file/b.bin", b"abcdef")  # of another time
    with pytest.raises(DataError, match=r"b\.bin has changed"):
        file.open()


def test_a_remote_file_that_is_refused_is_an_error():
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/byte_file/c.bin", b"123456")
    opened = ByteFile.find("memory://byte_file/c.bin").open()
    memory.rm("/byte_file/c.bin")
    with pytest.raises(DataError, match=r"memory://byte_file/c\.bin cannot be read: FileNotFoundError"):
        opened.read([(0, 6), (1, 2)])


def test_how_a_file_is_compressed(tmp_path):
    for name, compression in {"a.gz": "gzip", "a.json.bz2": "bz2", "a.xz": "xz", "a.json": None}.items():
        (tmp_path / name).write_bytes(b"x")
        assert ByteFile.find(str(tmp_path / name)).compression == compression


def test_a_file_of_an_archive_is_judged_by_its_own_name(tmp_path):
    url = tar_of(tmp_path, {"a.txt": b"x", "b.tar": b"x"})
    assert ByteFile.find(f"tar://a.txt::{url}").compression is None
    with pytest.raises(DataError, match=r"b\.tar::.* is an archive"):
        ByteFile.find(f"tar://b.tar::{url}")


def test_threads_read_a_file_of_an_archive_in_turn(tmp_path):
    data = random.Random(0).randbytes(2**20)
    opened = ByteFile.find(f"tar://a.bin::{tar_of(tmp_path, {'a.bin': data})}").open()
    parts = [(begin, begin + 1024) for begin in range(0, len(data), 1024)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda part: opened.read([part])[0], parts))
    assert b"".join(found) == data


def test_files_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    def refused(path, message, data=None):
        if data is not None:
            (tmp_path / path).write_bytes(data)
            path = str(tmp_path / path)
        with pytest.raises(DataError, match=message):
            ByteFile.find(path)

    refused("empty", r"empty is empty \(0 bytes\)", b"")
    refused("/gone/a.txt", "/gone/a.txt cannot be read: No such file")
    refused("memory://gone/a.txt", "memory://gone/a.txt cannot be read")
    refused("nul\0", "cannot be read: ValueError: embedded null byte")
    refused("unheard://of", "unheard://of cannot be opened: ValueError: Protocol not known")
    for url in ("tar://a::/nope", "zip://a::/nope", "http://["):
        refused(url, "cannot be")
    for name in ("a.zip", "a.tar", "a.TAR.gz", "a.jsonl.tar.zst", "a.tgz", "a.tbz2"):
        refused(name, f"{name} is an archive", b"PK")
    monkeypatch.setattr("lanewise.data.byte_file.infer_compression", lambda _: None)
    refused("a.zst", "pip install zstandard", b"x")


def test_a_range_behind_the_end_is_an_error(path):
    with pytest.raises(DataError, match=r"a\.bin ends before byte 101"):
        ByteFile.find(str(path)).open().read([(99, 101)])


@pytest.fixture(params=["local", "remote"])
def written(request, tmp_path):
    """Write bytes to a file, and find it."""

    def write(name, data):
        if request.param == "local":
            (tmp_path / name).write_bytes(data)
            return ByteFile.find(str(tmp_path / name))
        fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{name}", data)
        return ByteFile.find(f"memory://{tmp_path.name}/{name}")

    return write


def test_bytes_of_a_stream_are_counted_as_they_are_read(written):
    counts = []
    with written("a", bytes(range(100))).stream(counts.append) as stream:
        assert stream.seek(10) == 10
        assert stream.read(5) == bytes(range(10, 15))
        assert stream.tell() == 15
        assert stream.seek(0, 2) == 100
        assert stream.read(5) == b""
    assert stream.closed
    assert counts == [5, 0]


def test_a_decompressor_reads_of_a_stream(written):
    counts, file = [], written("a.gz", gzip.compress(b"text" * 1000))
    with file.stream(counts.append) as stream, gzip.open(stream) as text:
        assert text.read() == b"text" * 1000
    assert sum(counts) == file.size


def test_a_file_that_changed_is_no_stream(written):
    file = written("a", b"1")
    written("a", b"12")
    with pytest.raises(DataError, match=r"a has changed.* 1 bytes, and has 2 now"):
        file.stream(len)


def test_a_stream_that_cannot_be_read_on_is_an_error_of_the_file(written):
    def broken(buffer):
        raise OSError(5, "Input/output error")

    with written("a", b"1").stream(len) as stream:
        stream._opened = SimpleNamespace(
            readinto=broken, seek=stream._opened.seek, close=stream._opened.close
        )
        with pytest.raises(DataError, match="a cannot be read: Input/output error"):
            stream.read(1)
