"""Rows of Parquet files come out right and in order, each byte is read once, and every mistake is told."""

import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import lanewise.data
from lanewise.data import LaneReader, ParquetDataset
from lanewise.data.byte_file import ByteStream, unreadable
from lanewise.data.collate import collate
from lanewise.errors import DataError
from lanewise.lanes import LaneTurn
from tests.slow import slow

COUNTER = itertools.count()


def table(first: int, num_rows: int) -> pa.Table:
    """Rows whose values tell their number."""
    rows = range(first, first + num_rows)
    return pa.table(
        {
            "id": pa.array(rows, pa.int64()),
            "tokens": pa.array([list(range(row, row + row % 4)) for row in rows], pa.list_(pa.int32())),
            "kind": pa.array([f"kind {row % 3}" for row in rows], pa.string()).dictionary_encode(),
        }
    )


def write(path, sizes, first: int = 0, **options) -> int:
    """Write a file with row groups of these sizes; return the number of the row that would come next."""
    options = {"compression": "none", **options}
    with pq.ParquetWriter(path, table(0, 0).schema, **options) as file:
        for size in sizes:
            group = table(first, size)
            file.write_batch(group.combine_chunks().to_batches()[0]) if size else file.write_table(group)
            first += size
    return first


FILES = [[700], [], [1, 0, 513, 3], [0], [40 + 11 * k for k in range(13)], [1024, 512]]
NUM_ROWS = sum(map(sum, FILES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    first = 0
    for number, sizes in enumerate(FILES):
        first = write(folder / f"{number}.parquet", sizes, first)
    return folder


def expected(row: int) -> dict:
    return {"id": row, "tokens": list(range(row, row + row % 4)), "kind": f"kind {row % 3}"}


def plain(sample) -> dict:
    return {**sample, "tokens": sample["tokens"].tolist()}


def test_rows_of_files_with_unequal_row_groups(folder):
    dataset = ParquetDataset(f"{folder}/*.parquet")
    assert len(dataset) == NUM_ROWS
    assert list(dataset.block_sizes()) == [size for sizes in FILES for size in sizes]
    rows = list(range(NUM_ROWS))
    random.Random(0).shuffle(rows)
    for first in range(0, NUM_ROWS, 64):
        wanted = rows[first : first + 64]
        read = dataset.__getitems__(wanted)
        assert read.columns["id"].tolist() == wanted
        assert [plain(sample) for sample in read] == [expected(row) for row in wanted]
    assert plain(dataset[-1]) == expected(NUM_ROWS - 1)


def test_the_order_of_the_files_is_that_of_the_paths(folder):
    dataset = ParquetDataset([folder / "2.parquet", f"{folder}/[0-1].parquet"], ["id"])
    ids = dataset.__getitems__(list(range(len(dataset)))).columns["id"].tolist()
    assert ids == [*range(700, 700 + 517), *range(700)]


def test_rows_may_repeat_and_be_none(folder):
    dataset = ParquetDataset(f"{folder}/*.parquet")
    assert dataset.__getitems__([5, 5, 3]).columns["id"].tolist() == [5, 5, 3]
    assert len(dataset.__getitems__([])) == 0
    for outside in ([-1], [0, NUM_ROWS]):
        with pytest.raises(IndexError, match=f"of {NUM_ROWS}"):
            dataset.__getitems__(outside)


def test_columns_are_chosen_in_their_order(folder):
    dataset = ParquetDataset(f"{folder}/*.parquet", ["tokens", "id"])
    assert list(dataset[3]) == list(dataset.__getitems__([3]).columns) == ["tokens", "id"]


def test_types_survive(tmp_path):
    columns = {
        "i": pa.array([1, 2], pa.uint16()),
        "f": pa.array([1.5, 2.5], pa.float32()),
        "b": pa.array([True, False]),
        "v": pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
        "n": pa.array([[[1], []], [[2, 3]]]),
        "s": pa.array([{"a": 1, "b": [1]}, None]),
        "t": pa.array(["a", None], pa.large_string()),
        "d.e": pa.array([1, 2]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a")
    dataset = ParquetDataset(tmp_path / "a")
    read = dataset.__getitems__([0, 1]).columns
    kinds = [(name, column.dtype) for name, column in read.items() if isinstance(column, torch.Tensor)]
    assert kinds == [
        ("i", torch.uint16),
        ("f", torch.float32),
        ("b", torch.bool),
        ("v", torch.float32),
        ("d.e", torch.int64),
    ]
    assert read["v"].shape == (2, 2)
    assert read["n"].values.offsets.tolist() == [0, 1, 1, 3]
    assert (read["s"], read["t"]) == ([{"a": 1, "b": [1]}, None], ["a", None])
    assert dataset.total_bytes == sum(
        pq.read_metadata(tmp_path / "a").row_group(0).column(leaf).total_compressed_size for leaf in range(9)
    )


NUMBERS = {
    "a": pa.array(range(1500), pa.int16()),
    "text": pa.array([f"{row}" for row in range(1500)]),
    "b": pa.array([row % 3 == 0 for row in range(1500)]),
    "c": pa.array([row / 4 for row in range(1500)], pa.float32()),
    "d": pa.array([row % 7 for row in range(1500)], pa.int64()).dictionary_encode(),
}


@pytest.mark.parametrize("columns", [["c", "text", "a", "b", "d"], ["b", "a"], ["text"], ["d"]])
@pytest.mark.parametrize("statistics", [True, False, ["c"]])
def test_numbers_are_the_same_whether_or_not_the_footer_says_that_none_is_null(tmp_path, columns, statistics):
    for number in range(2):
        pq.write_table(
            pa.table(NUMBERS), tmp_path / str(number), 700, write_statistics=statistics or number == 0
        )
    dataset = ParquetDataset(f"{tmp_path}/*", columns)
    rows = random.Random(0).choices(range(3000), k=200)
    read = dataset.__getitems__(rows)
    assert list(read.columns) == list(read[0]) == columns
    for name in columns:
        values = [NUMBERS[name][row % 1500].as_py() for row in rows]
        assert [row[name] for row in read] == values
        assert type(read[0][name]) is type(values[0])
        column = read.columns[name]
        assert (column.tolist() if isinstance(column, torch.Tensor) else column) == values
        whole = dataset.column(name)
        assert (whole.tolist() if isinstance(whole, torch.Tensor) else whole) == NUMBERS[name].to_pylist() * 2
    kinds = {"a": torch.int16, "b": torch.bool, "c": torch.float32, "d": torch.int64}
    assert all(read.columns[name].dtype == kinds[name] for name in columns if name != "text")


def test_a_null_in_a_later_row_group_is_none(tmp_path):
    values = [1, 2, 3, None, 5]
    pq.write_table(pa.table({"x": values, "y": range(5)}), tmp_path / "a", row_group_size=2)
    dataset = ParquetDataset(tmp_path / "a")
    assert [row["x"] for row in dataset.__getitems__([3, 0, 4])] == [None, 1, 5]
    assert dataset.__getitems__([3, 0]).columns["y"].tolist() == [3, 0]
    assert dataset.__getitems__([4, 0]).columns["x"].tolist() == [5, 1]
    with pytest.raises(DataError, match="Column 'x' has nulls"):
        dataset.__getitems__([3]).columns["x"]


def test_a_footer_that_would_abort_the_process_is_an_error_that_names_its_file(tmp_path, capfd):
    """One bit ended the process within pyarrow: a statistic is of another type than its column."""
    for number in range(3):
        write(tmp_path / f"{number}.parquet", [5])
    path = tmp_path / "1.parquet"
    data = bytearray(path.read_bytes())
    data[data.rindex(b"\x1c\x15\x04\x19") + 2] ^= 8  # int64 in the description of the last chunk of `id`
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"1\.parquet cannot be read as Parquet: its footer is damaged"):
        ParquetDataset(tmp_path / "*.parquet")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("step", [211, *slow(11)])
def test_any_bit_of_a_footer_gives_rows_or_an_error(tmp_path, step):
    """A name that is no UTF-8, or a schema of pyarrow's that has other columns, was an error of Python's."""
    path = tmp_path / "a.parquet"
    write(path, [5])
    good = path.read_bytes()
    begin = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    num_refused = 0
    for place in range(8 * begin, 8 * len(good), step):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            ParquetDataset(path)
        except DataError as error:
            num_refused += str(path) in str(error)
    assert num_refused > 10


def test_a_null_of_which_the_footer_does_not_tell_is_damage(tmp_path, monkeypatch):
    pq.write_table(pa.table({"x": [1, None]}), tmp_path / "a")
    monkeypatch.setattr("lanewise.data.row_groups._has_no_nulls", lambda _: True)
    with pytest.raises(
        DataError, match=r"cannot be decoded after row 0: column 'x' has nulls, and the footer"
    ):
        ParquetDataset(tmp_path / "a").__getitems__([0])


@pytest.mark.parametrize("columns", [["id"], ["kind", "id"]])
def test_what_is_left_out_leaves_the_others_in_their_order(tmp_path, columns):
    path = tmp_path / "a"
    write(path, [600, 600, 600], **PAGES)
    damage(path, 1, 0, 0)
    dataset = ParquetDataset(path, columns, on_error="skip")
    assert dataset.__getitems__([1300, 700, 5, 1200, 650]).columns["id"].tolist() == [1300, 5, 1200]
    assert len(dataset.__getitems__([700, 650])) == 0
    assert dataset.num_skipped == 4


def in_turn(places: list[range]) -> list[int]:
    """One row of each place, then the next of each, and so on."""
    return [row for rows in itertools.zip_longest(*places) for row in rows if row is not None]


@pytest.mark.parametrize("columns", [None, ["tokens"]])
def test_each_byte_is_read_once_where_places_are_read_in_turn(tmp_path, columns):
    for number in range(3):
        write(tmp_path / f"{number}", [4000, 2600], 6600 * number, compression="snappy")
    dataset = ParquetDataset(f"{tmp_path}/*", columns)
    assert dataset.read_bytes == 0  # without the footers
    rows = in_turn([range(2000), range(2000, 6600), range(6600, 13200), range(13200, 19800)])
    for first in range(0, len(rows), 32):
        dataset.__getitems__(rows[first : first + 32])
    assert dataset.read_bytes == dataset.total_bytes
    assert dataset._reader._bytes_kept == 0


def test_a_wide_file_costs_what_is_read_of_it(tmp_path):
    write(tmp_path / "a", [5000])
    of_all, of_one = ParquetDataset(tmp_path / "a"), ParquetDataset(tmp_path / "a", ["id"])
    of_one.__getitems__(list(range(5000)))
    assert of_one.read_bytes == of_one.total_bytes < of_all.total_bytes


def test_a_row_costs_a_page_and_not_its_row_group(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 2**60, 100_000)
    pq.write_table(pa.table({"x": numbers}), tmp_path / "a", use_dictionary=False, data_page_size=10_000)
    dataset = ParquetDataset(tmp_path / "a")
    assert dataset[700]["x"] == numbers[700]
    assert 0 < dataset.read_bytes < dataset.total_bytes / 5


def test_too_little_memory_costs_time_and_says_so(folder, caplog):
    dataset = ParquetDataset(f"{folder}/*.parquet", memory_mib=0.01)
    starts = dataset._starts[:-1]
    for row in range(40):
        wanted = [int(start) + row for start in starts if int(start) + row < NUM_ROWS]
        assert dataset.__getitems__(wanted).columns["id"].tolist() == wanted
    (record,) = caplog.records
    assert "Give the dataset a larger memory_mib" in record.message
    assert dataset.read_bytes > 4 * dataset.total_bytes


# ------------------------------------------------------------------------------------------------ mistakes


def test_mistakes_in_the_files_are_told(tmp_path):
    write(tmp_path / "good", [3])
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no Parquet " * 100)
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:-20])
    for name, message in {
        "*.parquet": r"No file matches .*\*\.parquet",
        "missing": r"missing cannot be read: No such file",
        "empty": r"empty is empty \(0 bytes\)",
        "text": r"text \(1,100 bytes\) cannot be read as Parquet: .*magic bytes",
        "cut": r"cut \([\d,]+ bytes\) cannot be read as Parquet",
    }.items():
        with pytest.raises(DataError, match=message):
            ParquetDataset([tmp_path / "good", tmp_path / name])


def test_a_missing_column_is_told_with_those_that_are_there(tmp_path):
    write(tmp_path / "good", [3])
    pq.write_table(table(0, 3).select(["id", "kind"]), tmp_path / "other")
    with pytest.raises(DataError, match=r"good has no columns 'labels'\. Its columns: id, tokens, kind\."):
        ParquetDataset(tmp_path / "good", ["id", "labels"])
    with pytest.raises(DataError, match=r"other has no columns 'tokens'\. Its columns: id, kind\."):
        ParquetDataset([tmp_path / "good", tmp_path / "other"])
    assert len(ParquetDataset([tmp_path / "good", tmp_path / "other"], ["kind"])) == 6


def test_other_types_are_told_but_for_columns_that_are_not_read(tmp_path):
    write(tmp_path / "good", [3])
    other = table(0, 3)
    pq.write_table(other.set_column(0, "id", other["id"].cast(pa.int32())), tmp_path / "other")
    paths = [tmp_path / "good", tmp_path / "other"]
    with pytest.raises(DataError, match=r"Column 'id' is int64 in .*good, and int32 in .*other\."):
        ParquetDataset(paths)
    assert len(ParquetDataset(paths, ["tokens"])) == 6


def test_a_dictionary_and_names_of_list_items_are_no_other_type(tmp_path):
    write(tmp_path / "good", [3])
    other = table(3, 3)
    kind = pa.list_(pa.field("another name", pa.int32()))
    tokens = pa.array(other["tokens"].to_pylist(), kind)
    other = other.set_column(2, "kind", other["kind"].cast(pa.string())).set_column(1, "tokens", tokens)
    pq.write_table(other, tmp_path / "other", use_compliant_nested_type=False)
    dataset = ParquetDataset([tmp_path / "good", tmp_path / "other"])
    assert [plain(sample) for sample in dataset.__getitems__([4, 1, 3])] == [
        expected(row) for row in (4, 1, 3)
    ]


def test_wrong_arguments_are_told(folder):
    with pytest.raises(DataError, match=r"on_error is 'ignore'\. It can be raise or skip"):
        ParquetDataset(f"{folder}/*.parquet", on_error="ignore")
    with pytest.raises(DataError, match=r"memory_mib is nan\. It is a number of MiB above 0"):
        ParquetDataset(f"{folder}/*.parquet", memory_mib=float("nan"))


def test_without_pyarrow_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for module in ("parquet", "row_groups"):
        monkeypatch.delitem(sys.modules, f"lanewise.data.{module}")
        # Importing it anew changes the attribute, by which later tests find what they replace.
        monkeypatch.setattr(lanewise.data, module, getattr(lanewise.data, module))
    dataset_class = lanewise.data.ParquetDataset  # imported anew
    with pytest.raises(DataError, match=r"Run: pip install 'lanewise\[parquet\]'"):
        dataset_class(f"{folder}/*.parquet")


def damage(path: Path, group: int, column: int, share: float) -> None:
    """Overwrite some bytes of a stored column, so much of the way through it."""
    stored = pq.read_metadata(path).row_group(group).column(column)
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(stored.data_page_offset + int(share * stored.total_compressed_size))
        file.write(b"\xff" * 40)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


PAGES = {
    "use_dictionary": False,
    "data_page_size": 1000,
    "write_batch_size": 100,
    "write_page_checksum": True,
}


@pytest.mark.parametrize(("share", "is_half_good"), [(0, False), (0.5, True)])
def test_a_damaged_row_group_is_told_or_skipped(tmp_path, caplog, share, is_half_good):
    path = tmp_path / "a"
    write(path, [600, 3000, 600], **PAGES)
    damage(path, 1, 0, share)
    dataset = ParquetDataset(path)
    with pytest.raises(DataError, match=r"The row group 1 of .*a \(3,000 rows\) cannot be decoded after row"):
        dataset[3599]
    assert dataset.__getitems__([599, 3600]).columns["id"].tolist() == [599, 3600]

    rows = list(range(590, 3610, 7))
    reads = []
    for order in (rows, rows[::-1]):  # what is skipped must not depend on what was read before
        dataset = ParquetDataset(path, on_error="skip")
        read = [row["id"] for index in order for row in dataset.__getitems__([index, 5])]
        read = sorted(row for row in read if row != 5)
        assert dataset.num_skipped == len(rows) - len(read)
        reads.append(read)
    assert reads[0] == reads[1]
    good = [row for row in reads[0] if 600 <= row < 3600]
    assert good == [row for row in rows if 600 <= row <= (good or [0])[-1]]
    assert bool(good) is is_half_good
    assert [row for row in reads[0] if not 600 <= row < 3600] == [
        row for row in rows if not 600 <= row < 3600
    ]
    first, second = (record.message for record in caplog.records)
    assert first == second
    assert "row group 1 of" in first
    assert f"Its last {3000 - (len(good) and (good[-1] - 600) // 512 + 1) * 512} rows are left out" in first


def test_a_page_with_a_wrong_checksum_is_damaged(tmp_path):
    path = tmp_path / "a"
    write(path, [600], use_dictionary=False, write_page_checksum=True)
    damage(path, 0, 0, 0.5)
    with pytest.raises(DataError, match=r"cannot be decoded after row 0: .*CRC"):
        ParquetDataset(path)[0]


def test_what_a_disk_refuses_is_not_left_out(tmp_path, monkeypatch):
    """It may come another time, or to another process."""
    write(tmp_path / "a", [600])
    dataset = ParquetDataset(tmp_path / "a", on_error="skip")

    def refuse(self, buffer):
        raise unreadable(self._file.path, OSError(5, "Input/output error"))

    monkeypatch.setattr(ByteStream, "readinto", refuse)
    with pytest.raises(DataError, match="a cannot be read: Input/output error"):
        dataset.__getitems__([0])


def change_time(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("was_open", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_time, r"has changed while it was in use: it had [\d,]+ bytes, and has"),
        (lambda path: write(path, [1300]), r"has changed .* bytes, and has [\d,]+ now.* start again"),
        (Path.unlink, "cannot be read: No such file"),
        (lambda path: path.write_bytes(b""), r"has changed .* bytes, and has 0 now"),
    ],
)
def test_a_changed_file_is_told(tmp_path, on_error, was_open, change, message):
    path = tmp_path / "a"
    write(path, [1200])
    dataset = ParquetDataset(path, on_error=on_error)
    if was_open:
        assert dataset[3]["id"] == 3
    change(path)
    with pytest.raises(DataError, match=message):
        dataset[1100]


# ------------------------------------------------------------------------------------- processes and places


def ids(dataset, rows) -> list[int]:
    return dataset.__getitems__(rows).columns["id"].tolist()


def test_a_pickled_dataset_reads_on_by_itself(folder):
    dataset = ParquetDataset(f"{folder}/*.parquet")
    rows = list(range(0, NUM_ROWS, 9))
    ids(dataset, rows[:50])
    copy = pickle.loads(pickle.dumps(dataset))
    assert ids(copy, rows) == ids(dataset, rows) == rows
    assert copy.fingerprint() == dataset.fingerprint()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_processes_read_the_same_as_this_one(folder, context):
    dataset = ParquetDataset(f"{folder}/*.parquet")
    rows = list(range(0, NUM_ROWS, 2))
    ids(dataset, rows[:200:3])  # leaves cursors open
    reader = LaneReader(dataset, collate, 0)
    turn = LaneTurn(0, 0, 0, positions=range(4), present=range(1), is_last=True)
    batches = [(turn, tuple(rows[first : first + 50])) for first in range(0, len(rows), 50)]
    loader = DataLoader(
        reader, sampler=batches, batch_size=None, num_workers=2, multiprocessing_context=context
    )
    for (_, wanted), batch in zip(batches, loader, strict=True):
        assert batch.data["id"].tolist() == ids(dataset, list(wanted)) == list(wanted)
        assert len(batch.data["tokens"].lengths) == len(wanted)


def test_a_fork_and_its_parent_read_side_by_side(tmp_path):
    write(tmp_path / "a", [20_000])
    dataset = ParquetDataset(tmp_path / "a", ["id"])
    ids(dataset, [0])
    go, results = multiprocessing.get_context("fork").Barrier(2), multiprocessing.SimpleQueue()

    def read():
        go.wait(60)
        return all(ids(dataset, [row]) == [row] for row in range(0, 20_000, 100))

    process = multiprocessing.get_context("fork").Process(target=lambda: results.put(read()))
    process.start()
    assert read()
    process.join()
    assert results.get()


def test_remote_files_are_read_by_their_url(folder):
    root = f"memory://{next(COUNTER)}-parquet"
    files, name = fsspec.core.url_to_fs(root)
    files.put(str(folder), name, recursive=True)
    local, remote = ParquetDataset(f"{folder}/*.parquet"), ParquetDataset(f"{root}/*.parquet")
    rows = list(range(0, NUM_ROWS, 5))
    assert ids(remote, rows) == rows
    assert ids(local, rows) == rows
    assert remote.read_bytes == local.read_bytes > 0
    assert remote.fingerprint() == local.fingerprint()
    remote = ParquetDataset(f"{root}/0.parquet")
    files.pipe_file(f"{name}/0.parquet", b"other")
    with pytest.raises(DataError, match=r"0\.parquet has changed .* and has 5 now"):
        remote[0]


def test_lanes_read_columns_also_of_a_subset(folder):
    dataset = Subset(ParquetDataset(f"{folder}/*.parquet"), list(range(100, 200)))
    turn = LaneTurn(0, 0, 0, positions=range(4), present=range(1), is_last=True)
    data = LaneReader(dataset, collate, 0)[turn, (3, 1)].data
    assert data["id"].tolist() == [103, 101]
    assert data["kind"] == ["kind 1", "kind 2"]


def test_a_fingerprint_tells_the_data_and_not_the_place(tmp_path):
    def fingerprint(*sizes, columns=None, **options):
        folder = tmp_path / str(next(COUNTER))
        folder.mkdir()
        write(folder / "a", sizes, **options)
        return ParquetDataset(folder / "a", columns).fingerprint()

    path = tmp_path / "moved"
    write(path, [300, 20])
    expected = ParquetDataset(path).fingerprint()
    shutil.copy(path, tmp_path / "again")
    assert fingerprint(300, 20) == expected == ParquetDataset(tmp_path / "again").fingerprint()
    others = [
        fingerprint(20, 300),
        fingerprint(320),
        fingerprint(300, 20, columns=["id"]),
        fingerprint(300, 20, columns=["tokens", "id", "kind"]),
        fingerprint(300, 20, compression="zstd"),
    ]
    assert len({expected, *others}) == 6


# ---------------------------------------------------------------------------------------------------- sizes


def test_a_billion_rows_start_at_once(tmp_path):
    """40 times 25 row groups of 1,000,000 equal rows."""
    group = pa.record_batch({"x": pa.array(np.zeros(10**6, np.int8)), "y": pa.array(np.ones(10**6, bool))})
    with pq.ParquetWriter(tmp_path / "0", group.schema) as file:
        for _ in range(25):
            file.write_batch(group)
    for number in range(1, 40):
        (tmp_path / str(number)).hardlink_to(tmp_path / "0")

    before = pa.total_allocated_bytes()
    start = time.process_time()
    dataset = ParquetDataset(f"{tmp_path}/*")
    assert len(dataset) == 10**9
    assert time.process_time() - start < 10
    start = time.process_time()
    rows = dataset.__getitems__([15_000_000 * strand + 700 for strand in range(64)])
    assert time.process_time() - start < 10
    assert rows.columns["x"].tolist() == [0] * 64
    assert pa.total_allocated_bytes() - before < 2**24
    assert len(pickle.dumps(dataset)) < 2**20
