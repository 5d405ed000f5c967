"""An index is built once by the processes of a machine, kept, and built anew where it no longer fits."""

import copy
import fcntl
import logging
import multiprocessing
import os
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lanewise.data import record_index
from lanewise.data.byte_file import ByteFile
from lanewise.data.record_index import index_files
from lanewise.errors import DataError

TEXT = b"one\n\ntwo\r\nthree"
OFFSETS = [0, 5, 10, 15]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "some" / "cache"


@pytest.fixture
def scans(monkeypatch):
    """The files that were searched."""
    searched = []
    scan_file = record_index.scan_file

    def counting(file, separator):
        searched.append(file.path)
        return scan_file(file, separator)

    monkeypatch.setattr(record_index, "scan_file", counting)
    return searched


def index(*paths, cache, separator=b"\n"):
    return index_files([ByteFile.find(str(path)) for path in paths], separator, cache)


def test_an_index_is_kept(path, cache, scans, caplog):
    caplog.set_level(logging.INFO)
    first, second = (index(path, cache=cache)[0] for _ in range(2))
    assert first.offsets.tolist() == second.offsets.tolist() == OFFSETS
    assert first.digest == second.digest
    assert len(first) == 3
    assert scans == [str(path)]
    assert [file.suffix for file in cache.iterdir()] == [".records"]
    assert [record.message.split(", in")[0] for record in caplog.records] == [
        "found 3 records in 1 of 1 files, of 0.0 MiB"
    ]


def test_each_file_and_separator_has_its_own(path, cache, tmp_path):
    (tmp_path / "b.txt").write_bytes(b"x\ny")
    indexes = index(path, tmp_path / "b.txt", path, cache=cache)
    assert [found.offsets.tolist() for found in indexes] == [OFFSETS, [0, 2, 3], OFFSETS]
    (other,) = index(path, cache=cache, separator=b"\n\n")
    assert other.offsets.tolist() == [0, 5, 15]
    assert other.digest != indexes[0].digest
    assert len(list(cache.iterdir())) == 3


def test_the_default_folder(path, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    index(path, cache=None)
    assert len(list((tmp_path / "xdg/lanewise").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    index(path, cache=None)
    assert len(list((tmp_path / "home/.cache/lanewise").iterdir())) == 1


def test_a_changed_file_is_searched_again(path, cache):
    index(path, cache=cache)
    path.write_bytes(b"123\n")
    assert index(path, cache=cache)[0].offsets.tolist() == [0, 4]
    before = path.stat()
    path.write_bytes(b"1\n2\n")  # of the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert index(path, cache=cache)[0].offsets.tolist() == [0, 2, 4]
    assert len(list(cache.iterdir())) == 1


def overwritten(data, at, new):
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize("max_loaded", [0, 2**20])
@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[:40],
        lambda data: data[:-8],
        lambda data: data + b"\0" * 8,
        lambda data: bytes(len(data)),
        lambda data: overwritten(data, 0, b"X"),
        lambda data: overwritten(data, 24, b"\xff" * 8),
        lambda data: overwritten(data, len(data) - 12, b"\0" * 8),
    ],
    ids=["empty", "no header", "short", "long", "zeros", "magic", "count", "end"],
)
def test_a_damaged_index_is_built_again(path, cache, scans, damage, monkeypatch, max_loaded):
    monkeypatch.setattr(record_index, "_MAX_LOADED_BYTES", max_loaded)
    index(path, cache=cache)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert index(path, cache=cache)[0].offsets.tolist() == OFFSETS
    assert len(scans) == 2
    assert kept.read_bytes() == whole


def test_an_index_that_is_loaded_whole_is_compared_with_its_checksum(path, cache):
    index(path, cache=cache)
    (kept,) = cache.iterdir()
    kept.write_bytes(overwritten(kept.read_bytes(), record_index._HEADER.size + 12, b"\1"))
    assert index(path, cache=cache)[0].offsets.tolist() == OFFSETS


def test_a_long_index_stays_on_the_disk_and_so_does_its_copy(path, cache, monkeypatch):
    (loaded,) = index(path, cache=cache)
    monkeypatch.setattr(record_index, "_MAX_LOADED_BYTES", 47)
    (mapped,) = index(path, cache=cache)
    assert isinstance(mapped.offsets, np.memmap)
    for copied in (mapped, pickle.loads(pickle.dumps(mapped)), copy.deepcopy(mapped)):
        assert isinstance(copied.offsets, np.memmap)
        assert copied.offsets.tolist() == OFFSETS
        assert (len(copied), copied.digest) == (3, loaded.digest)
    assert pickle.loads(pickle.dumps(loaded)).offsets.tolist() == OFFSETS
    pickled = pickle.dumps(mapped)
    path.write_bytes(b"1\n2\n3\n4\n")
    index(path, cache=cache)
    with pytest.raises(DataError, match="was made anew, as its file changed"):
        pickle.loads(pickled)
    next(cache.iterdir()).unlink()
    with pytest.raises(DataError, match="cannot be read any more"):
        pickle.loads(pickled)


def unwritable(kind, tmp_path, monkeypatch):
    if kind == "no folder":
        (tmp_path / "file").touch()
        return tmp_path / "file" / "cache"
    if kind == "null":
        return Path(tmp_path, "a\0b")
    if kind == "full disk":

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["no folder", "null", "full disk"])
def test_where_nothing_can_be_kept_the_index_is_in_memory_and_one_line_says_so(
    path, tmp_path, monkeypatch, kind, caplog
):
    (expected,) = index(path, cache=tmp_path / "fine")
    caplog.clear()
    cache = unwritable(kind, tmp_path, monkeypatch)
    for found in index(path, path, cache=cache):
        assert found.offsets.tolist() == OFFSETS
        assert found.digest == expected.digest
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "each process finds again where records begin" in record.message
    assert [file.name for file in cache.glob("*") if file.suffix != ".lock"] == []


def test_nobody_knows_the_home_folder(path, monkeypatch):
    def home(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(record_index.Path, "expanduser", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert index(path, cache=None)[0].offsets.tolist() == OFFSETS


def build_in_process(path, cache, begin, counts):
    searched = []
    scan_file = record_index.scan_file

    def slow(file, separator):
        searched.append(file.path)
        time.sleep(0.3)  # the others find the lock taken
        return scan_file(file, separator)

    record_index.scan_file = slow
    begin.wait()
    (found,) = index_files([ByteFile.find(str(path))], b"\n", cache)
    counts.put((len(searched), found.offsets.tolist()))


def test_processes_that_start_at_once_build_it_once(path, cache):
    fork = multiprocessing.get_context("fork")
    begin, counts = fork.Barrier(3), fork.SimpleQueue()
    processes = [fork.Process(target=build_in_process, args=(path, cache, begin, counts)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [counts.get() for _ in processes]
    for process in processes:
        process.join()
    assert sorted(searched for searched, _ in found) == [0, 0, 1]
    assert [offsets for _, offsets in found] == [OFFSETS] * 3
    assert len(list(cache.iterdir())) == 1


def test_whoever_waits_says_so(path, cache, caplog):
    caplog.set_level(logging.INFO)
    index(path, cache=cache)
    (kept,) = cache.iterdir()
    lock = kept.with_suffix(".lock").open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX)
    kept.unlink()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(index, path, cache=cache)
        while not any("waiting for another process" in record.message for record in caplog.records):
            threading.Event().wait(0.01)
        lock.close()
        assert waiting.result()[0].offsets.tolist() == OFFSETS


def test_a_file_system_without_locks(path, cache, monkeypatch):
    def flock(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert index(path, cache=cache)[0].offsets.tolist() == OFFSETS
    assert [file.suffix for file in cache.iterdir()] == [".records"]


def test_what_a_killed_process_left_is_removed(path, cache):
    index(path, cache=cache)
    (kept,) = cache.iterdir()
    kept.with_name(f".{kept.name}.tmp").write_bytes(b"part")
    kept.unlink()
    index(path, cache=cache)
    assert list(cache.iterdir()) == [kept]


def test_a_file_of_empty_records_is_refused(path, cache):
    path.write_bytes(b"\n\r\n\n")
    with pytest.raises(DataError, match=r"a\.txt holds no record that is not empty"):
        index(path, cache=cache)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("suffix", [".records", ".lock"])
def test_a_fifo_in_the_cache_is_not_waited_for(path, cache, suffix, caplog):
    index(path, cache=cache)
    (kept,) = cache.iterdir()
    kept.unlink()
    os.mkfifo(kept.with_suffix(suffix))
    assert index(path, cache=cache)[0].offsets.tolist() == OFFSETS
    if suffix == ".records":
        assert kept.is_file()  # made anew
    else:
        assert "each process finds again where records begin" in caplog.records[-1].message
        assert re.search(r"No such device or address: '.*\.lock'$", caplog.records[-1].message)
