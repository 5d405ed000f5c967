"""Which files there are, and their bytes."""

import gzip
import itertools
from pathlib import Path

import fsspec
import pytest

from lanewise.data.source_file import Stamp, list_files, open_file, stamp_of
from lanewise.errors import DataError

COUNTER = itertools.count()


@pytest.fixture(params=["local", "remote"])
def folder(request, tmp_path):
    """The name of an empty folder, with a function that writes a file in it."""
    if request.param == "local":
        return f"{tmp_path}", lambda name, data: Path(tmp_path, name).write_bytes(data)
    root = f"memory://{next(COUNTER)}-{tmp_path.name}"

    def write(name, data):
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(data)

    return root, write


def test_a_glob_is_sorted_and_a_list_keeps_its_order(folder):
    root, write = folder
    for name in ("b.x", "a.x", "c.y"):
        write(name, b"1")
    a, b, c = (f"{root}/{name}" for name in ("a.x", "b.x", "c.y"))
    assert [Path(one).name for one in list_files(f"{root}/*.x")] == ["a.x", "b.x"]
    assert list_files([c, b, a]) == [c, b, a]
    assert [Path(one).name for one in list_files([c, f"{root}/[ab].*"])] == ["c.y", "a.x", "b.x"]
    assert list_files(a) == [a]
    for found in list_files(f"{root}/*"):
        assert stamp_of(found).num_bytes == 1


def test_a_path_may_be_a_path_and_have_brackets(tmp_path):
    path = tmp_path / "a[1].x"
    path.write_bytes(b"1")
    assert list_files(path) == [str(path)]


def test_bytes_are_counted_as_they_are_read(folder):
    root, write = folder
    write("a", bytes(range(100)))
    counts = []
    with open_file(f"{root}/a", counts.append) as file:
        assert file.seek(10) == 10
        assert file.read(5) == bytes(range(10, 15))
        assert file.tell() == 15
        assert file.seek(0, 2) == 100
        assert file.read(5) == b""
    assert file.closed
    assert counts == [5, 0]


def test_a_decompressor_reads_of_it(folder):
    root, write = folder
    write("a.gz", gzip.compress(b"text" * 1000))
    counts = []
    with open_file(f"{root}/a.gz", counts.append) as file, gzip.open(file) as text:
        assert text.read() == b"text" * 1000
    assert sum(counts) == stamp_of(f"{root}/a.gz").num_bytes


def test_a_stamp_tells_size_and_time(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12")
    assert stamp_of(str(path)) == Stamp(2, path.stat().st_mtime_ns)


def test_mistakes_are_told(folder):
    root, write = folder
    write("empty", b"")
    with pytest.raises(DataError, match=r"No file matches .*/\*\.parquet\. The working directory is /"):
        list_files(f"{root}/*.parquet")
    with pytest.raises(DataError, match=r"There is no file .*/missing\.parquet"):
        stamp_of(f"{root}/missing.parquet")
    with pytest.raises(DataError, match=r"empty is empty \(0 bytes\)"):
        stamp_of(f"{root}/empty")


def test_a_folder_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(DataError, match=rf"is a folder\. Name the files in it, as in {tmp_path}/\*"):
        list_files(tmp_path)


def test_no_paths_are_refused():
    with pytest.raises(DataError, match="has no files: paths is empty"):
        list_files([])


def test_an_unknown_protocol_is_refused():
    with pytest.raises(DataError, match=r"nowhere://a cannot be opened: .*nowhere"):
        list_files("nowhere://a")
