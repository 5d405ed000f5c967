"""A handle that was opened before loader workers were forked is shared by them, which mixes samples up."""

import io
import os
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import lmdb
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from lanewise.data import LaneReader, read_turns
from lanewise.data.handles import open_handles
from lanewise.errors import DataError
from lanewise.lanes import LaneTurn


class Lines(Dataset[bytes]):
    """Lines of four bytes of a file that is opened when the first one is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __len__(self) -> int:
        return 8

    def is_open(self) -> bool:
        return self.file is not None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def __getitem__(self, index: int) -> bytes:
        if not self.is_open():
            self.file = self.path.open("rb")
            self.pid = os.getpid()
        self.file.seek(4 * index)
        return self.file.read(4)


class LinesOfEachProcess(Lines):
    """Opens it anew in each process."""

    def is_open(self) -> bool:
        return self.file is not None and self.pid == os.getpid()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:03}\n" for number in range(8)))
    return path


def read(dataset: Any, num_workers: int) -> list[Any]:
    turns = [LaneTurn(0, 0, lane, range(2), range(4), is_last=lane == 3) for lane in range(4)]
    requests = [(turn, (2 * turn.lane, 2 * turn.lane + 1)) for turn in turns]
    return [batch.data for batch in read_turns(LaneReader(dataset, list, 0), requests, num_workers)]


@pytest.mark.parametrize("wrap", [lambda lines: lines, lambda lines: Subset(lines, range(8))])
def test_a_file_that_was_opened_before_the_fork_is_an_error(path, wrap):
    """The processes compare samples first, so a file that is opened at the first read is open by then."""
    with closing(Lines(path)) as lines:
        assert len(read(lines, num_workers=0)) == 4
        with pytest.raises(DataError, match=r"Lines\.file \(_io\.BufferedReader\) was opened before"):
            read(wrap(lines), num_workers=2)


@pytest.mark.parametrize("reads_before", [False, True])
def test_a_file_that_each_process_opens_is_none(path, reads_before):
    expected = [[b"%03d\n" % (2 * lane), b"%03d\n" % (2 * lane + 1)] for lane in range(4)]
    with closing(LinesOfEachProcess(path)) as lines:
        if reads_before:
            assert read(lines, num_workers=0) == expected
        assert read(lines, num_workers=2) == expected


def test_one_that_is_first_opened_in_a_worker_is_none(path):
    assert len(read(Lines(path), num_workers=2)) == 4


class Holding(Dataset[Any]):
    """Holds something."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __len__(self) -> int:
        return 1


def archive(path: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("a", "b")
    return zipfile.ZipFile(path)


def tar(path: Path) -> tarfile.TarFile:
    with tarfile.open(path, "w"):
        pass
    return tarfile.open(path)


@pytest.mark.parametrize(
    "open_it",
    [lambda path: path.open("w+"), lambda path: path.open("wb+"), archive, tar, sqlite3.connect],
)
def test_files_archives_and_connections_are_seen(tmp_path, open_it: Callable[[Path], Any]):
    held = open_it(tmp_path / "it")
    found = list(open_handles(ConcatDataset([Holding(held)])))
    held.close()
    assert found == [("Holding.held", held)]
    if not isinstance(held, sqlite3.Connection):  # which does not tell that it is closed
        assert list(open_handles(Holding(held))) == []


def test_what_lies_in_memory_or_is_only_written_is_none(tmp_path):
    in_memory = io.BytesIO()
    zipfile.ZipFile(in_memory, "w").close()
    with (tmp_path / "log").open("w") as log:
        for held in (in_memory, zipfile.ZipFile(in_memory), log, io.StringIO(), "text", None):
            assert list(open_handles(Holding(held))) == []


def hdf5(path: Path) -> h5py.File:
    with h5py.File(path, "w") as file:
        file["lines"] = [b"%03d\n" % number for number in range(8)]
    return h5py.File(path)


def environment(path: Path) -> lmdb.Environment:
    with lmdb.open(str(path), subdir=False) as written, written.begin(write=True) as transaction:
        for number in range(8):
            transaction.put(b"%d" % number, b"%03d\n" % number)
    return lmdb.open(str(path), subdir=False, readonly=True, lock=False)


class LinesOfHDF5(Lines):
    """Lines of an HDF5 file."""

    def __getitem__(self, index: int) -> bytes:
        if not self.is_open():
            self.file, self.pid = h5py.File(self.path), os.getpid()
        return bytes(self.file["lines"][index])


class LinesOfLMDB(Lines):
    """Lines of an LMDB environment."""

    def __getitem__(self, index: int) -> bytes:
        if not self.is_open():
            self.close()  # a process opens an environment once
            self.file = lmdb.open(str(self.path), subdir=False, readonly=True, lock=False)
            self.pid = os.getpid()
        with self.file.begin() as transaction:
            return transaction.get(b"%d" % index)


class LinesOfHDF5OfEachProcess(LinesOfHDF5, LinesOfEachProcess):
    """Opens it anew in each process."""


class LinesOfLMDBOfEachProcess(LinesOfLMDB, LinesOfEachProcess):
    """Opens it anew in each process."""


@pytest.mark.parametrize(
    ("open_it", "shared", "own", "name"),
    [
        (hdf5, LinesOfHDF5, LinesOfHDF5OfEachProcess, "h5py._hl.files.File"),
        (environment, LinesOfLMDB, LinesOfLMDBOfEachProcess, "builtins.Environment"),
    ],
)
def test_hdf5_and_lmdb(tmp_path, open_it, shared, own, name):
    path = tmp_path / "it"
    held = open_it(path)
    assert list(open_handles(Holding(held))) == [("Holding.held", held)]
    held.close()
    assert list(open_handles(Holding(held))) == []
    with closing(shared(path)) as lines:
        expected = read(lines, num_workers=0)
        assert expected[1] == [b"002\n", b"003\n"]
        with pytest.raises(DataError, match=rf"{shared.__name__}\.file \({name}\) was opened before"):
            read(lines, num_workers=2)
    with closing(own(path)) as lines:
        assert read(lines, num_workers=0) == read(lines, num_workers=2) == expected


def test_datasets_that_know_each_other_are_looked_at_once(path):
    """It was a RecursionError, also of a program that opens no file."""
    lines, around = Lines(path), Subset([1], [0])
    lines.parent, around.dataset = around, lines
    assert list(open_handles(around)) == []
    lines[0]
    assert [name for name, _ in open_handles(around)] == ["Lines.file"]
    lines.close()
