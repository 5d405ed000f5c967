"""Records are read by their places, from plain and compressed, local and remote files alike."""

import bz2
import copy
import gzip
import lzma
import math
import os
import pickle
import zlib
from itertools import accumulate
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from torch.utils.data import DataLoader

from lanewise.data import FileDataset, record_files, record_index
from lanewise.data.byte_file import ByteStream
from lanewise.data.record_files import RecordFiles
from lanewise.data.record_scan import ENTRY
from lanewise.errors import DataError
from tests.slow import slow

zstandard = pytest.importorskip("zstandard")

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


class Upper(RecordFiles):
    """Letters are samples in upper case; digits cannot be decoded."""

    def __init__(self, paths, separator, **options):
        self._separator = separator
        super().__init__(paths, **options)

    def _decode(self, record):
        if record.isdigit():
            raise ValueError(f"{record[0:1].decode()} is a digit")
        return record.decode().upper()


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(tmp_path, *contents, suffix=""):
    """Files of these contents."""
    paths = [tmp_path / f"{number}.txt{suffix}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(COMPRESS[suffix](content))
    return paths


def words(num):
    """Words of different lengths, and the same as samples."""
    some = [f"w{'xyz'[number % 3] * (number % 11)}{'abcdefghij'[number % 10]}" for number in range(num)]
    return [word.encode() for word in some], [word.upper() for word in some]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("separator", [b"\n", b"<>"])
def test_records_in_any_order(tmp_path, suffix, separator):
    records, samples = words(1500)
    contents = [separator * 2 + separator.join(records[:1400]) + separator, separator.join(records[1400:])]
    dataset = Upper(write(tmp_path, *contents, suffix=suffix), separator)
    assert isinstance(dataset, FileDataset)
    assert len(dataset) == 1500
    assert dataset.__getitems__(list(range(1500))) == samples
    some = [1499, 0, 700, 1400, 1399, 700, 513, 511, 512]
    assert dataset.__getitems__(some) == [samples[index] for index in some]
    assert [dataset[0], dataset[-1]] == [samples[0], samples[-1]]
    with pytest.raises(IndexError, match="sample 1500 of 1500"):
        dataset[1500]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_whole_files(tmp_path, suffix):
    dataset = Upper(write(tmp_path, b"a\nb\n", b"\r\n", suffix=suffix), None)
    assert dataset.__getitems__([1, 0]) == ["\r\n", "A\nB\n"]


def test_a_carriage_return_goes_before_a_line_feed_only(tmp_path):
    assert list(Upper(write(tmp_path, b"a\r\n\r\nb\r\r\nc\r"), b"\n")) == ["A", "B\r", "C"]
    assert list(Upper(write(tmp_path, b"a\r;b\r"), b";")) == ["A\r", "B\r"]


def test_remote_files(tmp_path):
    memory = fsspec.filesystem("memory")
    records, samples = words(30)
    memory.pipe_file("/record_files/0.txt", b"\n".join(records[:20]))
    memory.pipe_file("/record_files/1.txt.gz", gzip.compress(b"\n".join(records[20:])))
    dataset = Upper("memory://record_files/*", b"\n")
    assert dataset.__getitems__([25, 3, 4, 0, 19]) == [samples[index] for index in (25, 3, 4, 0, 19)]


def test_each_byte_of_a_plain_file_is_read_once(tmp_path, monkeypatch):
    records, _ = words(100)
    content = b"\n".join(records)
    dataset = Upper(write(tmp_path, content), b"\n")
    calls, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: calls.append(args[1:]) or pread(*args))
    assert dataset.read_bytes == 0
    dataset.__getitems__([3, 50, 5, 4])
    begins = [0, *accumulate(len(record) + 1 for record in records)]
    assert calls == [(begins[6] - begins[3], begins[3]), (begins[51] - begins[50], begins[50])]
    assert dataset.read_bytes == sum(size for size, _ in calls)
    dataset.__getitems__([index for index in range(100) if index not in {3, 4, 5, 50}])
    assert dataset.read_bytes == dataset.total_bytes == len(content)


def test_a_compressed_file_that_is_read_forward_is_read_once(tmp_path):
    records, samples = words(5000)
    paths = write(tmp_path, b"\n".join(records), suffix=".gz")
    dataset = Upper(paths, b"\n", memory_mib=8)
    found = []
    for first in range(0, 5000, 50):
        found += dataset.__getitems__(list(range(first, first + 50)))
    assert found == samples
    assert dataset.read_bytes == dataset.total_bytes == paths[0].stat().st_size


def test_long_records_are_decompressed_few_at_a_time(tmp_path):
    paths = write(tmp_path, b"\n".join([b"x" * 100_000] * 40), suffix=".gz")
    dataset = Upper(paths, b"\n", memory_mib=256)
    dataset[0]
    assert dataset._rows_per_chunk == 2**20 // 100_001
    assert Upper(write(tmp_path, b"x\n" * 40, suffix=".gz"), b"\n")._rows_per_chunk == 512


def test_blocks_hold_consecutive_records(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "_BLOCK_BYTES", 10)
    plain = write(tmp_path, b"a\n" * 12, b"b" * 25 + b"\nc\nd", b"e")
    packed = write(tmp_path, b"f\n" * 100, suffix=".gz")
    dataset = Upper([*plain, *packed], b"\n")
    assert list(dataset.block_sizes()) == [5, 5, 2, 1, 2, 1, 100]
    assert sum(dataset.block_sizes()) == len(dataset)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_cannot_be_decoded_is_an_error(tmp_path, suffix):
    (path,) = write(tmp_path, b"a\n\n1234\nb\n" + b"5" * 2000, suffix=suffix)
    dataset = Upper(path, b"\n")
    assert dataset.__getitems__([0, 2]) == ["A", "B"]
    content = " of its content" if suffix else ""
    message = (
        rf"0\.txt{suffix}, byte 3{content}: 1 is a digit\. The record begins: b'1234'\..*on_error='skip'"
    )
    with pytest.raises(DataError, match=message):
        dataset.__getitems__([0, 1])
    with pytest.raises(DataError, match=r"byte 10.* b'5{100}' \.\.\."):
        dataset[3]
    assert dataset.num_skipped == 0


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_cannot_be_decoded_is_left_out(tmp_path, suffix, caplog):
    dataset = Upper(write(tmp_path, b"a\n" + b"1\nb\n" * 9, suffix=suffix), b"\n", on_error="skip")
    assert len(dataset) == 19
    assert dataset.__getitems__([2, 1, 0]) == ["B", "A"]
    assert dataset.num_skipped == 1
    assert dataset.__getitems__(list(range(19))) == ["A", *"B" * 9]
    assert dataset.num_skipped == 10
    messages = [record.message for record in caplog.records if record.name == record_files.__name__]
    assert len(messages) == 5
    assert "byte 2" in messages[0]
    assert [message.endswith("No more are named.") for message in messages] == [False] * 4 + [True]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_changes_is_an_error(tmp_path, suffix):
    (path,) = write(tmp_path, b"a\nb\n", suffix=suffix)
    dataset = Upper(path, b"\n")
    dataset[0]
    write(tmp_path, b"a\nb\nc\n", suffix=suffix)
    copied = pickle.loads(pickle.dumps(dataset))
    with pytest.raises(DataError, match="has changed"):
        copied[1]
    if not suffix:
        with pytest.raises(DataError, match="has changed"):
            dataset[1]


def overwrite(path, data):
    """Write a file again, of which the time stays."""
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def is_found(path, samples, **arguments):
    """Read all samples of a damaged file: they are right, or an error names the damage."""
    try:
        assert Upper(path, b"\n", **arguments).__getitems__(list(range(len(samples)))) == samples
    except DataError as error:
        if "damaged" not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_flipped_bit_of_a_file_is_found_when_it_is_read_also_where_an_index_is_kept(
    tmp_path, suffix, on_error
):
    records, samples = words(1200)
    (path,) = write(tmp_path, b"\n".join(records), suffix=suffix)
    assert not is_found(path, samples)
    whole = path.read_bytes()
    num_found = 0
    for bit in range(5, 8 * len(whole), 8 * len(whole) // 40):
        overwrite(path, flipped(whole, bit))
        num_found += is_found(path, samples, on_error=on_error)
    assert num_found >= 30  # others are in what separates records, or means nothing
    overwrite(path, whole)
    assert not is_found(path, samples)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("max_loaded", [0, 2**20])
def test_a_flipped_bit_of_an_index_never_gives_a_wrong_sample(tmp_path, suffix, max_loaded, monkeypatch):
    monkeypatch.setattr(record_index, "_MAX_LOADED_BYTES", max_loaded)
    records, samples = words(9)
    (path,) = write(tmp_path, b"\n" + b"\n".join(records), suffix=suffix)
    Upper(path, b"\n")
    (kept,) = (tmp_path / "cache/lanewise").iterdir()
    whole = kept.read_bytes()
    num_found = 0
    for bit in range(0, 8 * len(whole), 11):
        kept.write_bytes(flipped(whole, bit))
        num_found += is_found(path, samples)
    # A small one is made anew at the start.
    assert num_found == 0 if max_loaded else num_found > 30


def planted(offset, row):
    """An index with such an offset, all of whose checksums are right."""

    def plant(whole):
        entries = np.frombuffer(whole[record_index._HEADER.size :], ENTRY).copy()
        entries["offset"][row] = offset
        header = record_index._HEADER.unpack(whole[: record_index._HEADER.size])
        packed = record_index._HEADER.pack(*header[:6], zlib.crc32(entries.tobytes()), 0)[:-4]
        return packed + zlib.crc32(packed).to_bytes(4, "little") + entries.tobytes()

    return plant


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("max_loaded", [0, 2**20])
@pytest.mark.parametrize("offset", [-(2**63), -2, -1, 3, 2**40, 2**63 - 1])
@pytest.mark.parametrize("row", [0, 1, 2, -1])
def test_an_index_that_somebody_else_made_is_an_error_or_made_anew(
    tmp_path, suffix, max_loaded, offset, row, monkeypatch
):
    monkeypatch.setattr(record_index, "_MAX_LOADED_BYTES", max_loaded)
    records, samples = words(4)
    (path,) = write(tmp_path, b"\n".join(records), suffix=suffix)
    Upper(path, b"\n")
    (kept,) = (tmp_path / "cache/lanewise").iterdir()
    kept.write_bytes(planted(offset, row)(kept.read_bytes()))
    is_found(path, samples)


def cut_off(data: bytes) -> bytes:
    return data[:-20]


def flipped_in_the_middle(data: bytes) -> bytes:
    return flipped(data, 4 * len(data))


@pytest.mark.parametrize(
    ("suffix", "damage", "where"),
    [
        (".gz", cut_off, "cache"),
        (".bz2", flipped_in_the_middle, "memory"),
        (".xz", flipped_in_the_middle, "cache"),
        *slow(
            *((suffix, cut_off, "memory") for suffix in (".gz", ".bz2", ".xz")),
            *(
                (suffix, flipped_in_the_middle, where)
                for suffix, where in ((".gz", "cache"), (".gz", "memory"))
            ),
            *((suffix, cut_off, "cache") for suffix in (".bz2", ".xz")),
            (".bz2", flipped_in_the_middle, "cache"),
            (".xz", flipped_in_the_middle, "memory"),
        ),
    ],
)
def test_a_file_that_cannot_be_decompressed_is_left_out_and_it_is_said_how_much(
    tmp_path, suffix, damage, where, caplog, monkeypatch
):
    paths = write(tmp_path, b"a\nb\n", b"c\n1\n" * 10_000, b"d", suffix=suffix)
    paths[1].write_bytes(damage(paths[1].read_bytes()))
    cache_dir = tmp_path / "cache" if where == "cache" else paths[0] / "no folder"
    searched, scan_file = [], record_index.scan_file
    monkeypatch.setattr(record_index, "scan_file", lambda *args: searched.append(args) or scan_file(*args))
    fingerprints = set()
    for _ in range(2):
        dataset = Upper(paths, b"\n", on_error="skip", cache_dir=cache_dir)
        assert list(dataset) == ["A", "B", "D"]
        assert list(DataLoader(dataset, batch_size=None, num_workers=2)) == ["A", "B", "D"]
        fingerprints.add(dataset.fingerprint())
        message = caplog.records[-1].message
        sizes = [path.stat().st_size for path in paths]
        assert message == (
            f"left out: 1 of 3 files, {sizes[1]:,} of {sum(sizes):,} bytes, which cannot be decompressed to "
            f"the end: {paths[1]}"
        )
    assert len(fingerprints) == 1
    assert len(searched) == (3 if where == "cache" else 6)
    with pytest.raises(DataError, match=rf"1\.txt{suffix} cannot be read: "):
        Upper(paths, b"\n", cache_dir=cache_dir)
    with pytest.raises(DataError, match=r"No sample is left: 1 of 1 files"):
        Upper(paths[1], b"\n", on_error="skip", cache_dir=cache_dir)


def test_a_whole_file_that_cannot_be_decompressed_is_left_out(tmp_path, caplog):
    paths = write(tmp_path, b"a", b"b" * 100, b"c", suffix=".gz")
    paths[1].write_bytes(paths[1].read_bytes()[:-5])
    dataset = Upper(paths, None, on_error="skip")
    assert dataset.__getitems__([2, 1, 0]) == ["C", "A"]
    assert dataset.num_skipped == 1
    assert "left out: " in caplog.records[-1].message
    with pytest.raises(DataError, match=r"1\.txt\.gz cannot be read: EOFError"):
        Upper(paths, None)[1]


def test_a_file_that_cannot_be_read_is_no_damaged_one(tmp_path, monkeypatch):
    """What a disk or a network refuses may come another time: it is not left out for ever."""

    def refuse(buffer):
        raise OSError(5, "Input/output error")

    paths = write(tmp_path, b"a\nb\n", suffix=".gz")
    init = ByteStream.__init__

    def broken(self, file, opened, count):
        opened.close()
        init(self, file, SimpleNamespace(readinto=refuse, seek=lambda *_: 0, close=lambda: None), count)

    monkeypatch.setattr(ByteStream, "__init__", broken)
    with pytest.raises(DataError, match="cannot be read: Input/output error"):
        Upper(paths, b"\n", on_error="skip")
    assert not list((tmp_path / "cache/lanewise").glob("*.records"))


def test_the_fingerprint_tells_datasets_apart_but_not_where_they_lie(tmp_path):
    def fingerprint(*contents, separator=b"\n", kind=Upper):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return kind(write(folder, *contents), separator).fingerprint()

    expected = fingerprint(b"a\nbb", b"c")
    assert expected == fingerprint(b"a\nbb", b"c")
    others = [
        fingerprint(b"aa\nb", b"c"),
        fingerprint(b"a\nbb\n", b"c"),
        fingerprint(b"c", b"a\nbb"),
        fingerprint(b"a\nbb", b"c", separator=b"a"),
        fingerprint(b"a\nbb", b"c", separator=None),
        fingerprint(b"a\nbb", b"c", kind=type("Other", (Upper,), {})),
    ]
    assert len({expected, *others}) == 7
    assert expected.startswith("3 records, 5 bytes, ")


def plain_and_compressed(tmp_path):
    """A dataset of 20 records in a plain file and 20 in a compressed one, and its samples."""
    records, samples = words(40)
    plain = write(tmp_path, b"\n".join(records[:20]))
    return Upper([*plain, *write(tmp_path, b"\n".join(records[20:]), suffix=".gz")], b"\n"), samples


def test_a_copy_reads_by_itself(tmp_path):
    dataset, samples = plain_and_compressed(tmp_path)
    assert dataset.__getitems__([1, 21]) == [samples[1], samples[21]]
    assert len(pickle.dumps(dataset)) < 5000  # it holds no open file
    for copied in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert copied.__getitems__([2, 22]) == [samples[2], samples[22]]
        assert copied.fingerprint() == dataset.fingerprint()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_it(tmp_path, method):
    dataset, samples = plain_and_compressed(tmp_path)
    assert dataset.__getitems__([1, 21]) == [
        samples[1],
        samples[21],
    ]  # the files are open when the workers start
    loader = DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list, multiprocessing_context=method)
    assert [sample for batch in loader for sample in batch] == samples


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"separator": b""}, "The separator is empty"),
        ({"separator": b"\n", "on_error": "ignore"}, r"on_error is 'ignore'\. It can be raise or skip"),
        ({"separator": b"\n", "memory_mib": math.nan}, r"memory_mib is nan\. It is a number of MiB above 0"),
        ({"separator": b"\n", "memory_mib": "8"}, r"memory_mib is '8'\. It is a number of MiB above 0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    with pytest.raises(DataError, match=message):
        Upper(write(tmp_path, b"a"), **arguments)


@pytest.mark.parametrize("separator", [b"\n", None])
def test_an_empty_file_is_refused(tmp_path, separator):
    with pytest.raises(DataError, match=r"1\.txt is empty \(0 bytes\)"):
        Upper(write(tmp_path, b"a", b""), separator)
