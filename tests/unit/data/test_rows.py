"""Rows are dicts where they are indexed, and tensors as columns."""

import datetime as dt
import pickle
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import torch

from lanewise.data import Ragged, Rows
from lanewise.data.collate import collate
from lanewise.data.digest import digest
from lanewise.errors import DataError

DAY = dt.datetime(2020, 1, 1)  # noqa: DTZ001 - as Parquet has it


def rows_of(columns, order=None) -> Rows:
    """Rows that were cut out of a table one by one."""
    batch = pa.table(columns).to_batches()[0]
    return Rows([batch.slice(row, 1) for row in order or range(batch.num_rows)], batch.schema)


def same(value, other) -> bool:
    """Equal in values and in types, of tensors also the dtype."""
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, list | tuple):
        return type(value) is type(other) and len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and value == other


T = torch.tensor
COLUMNS = {
    "int64": (pa.array([1, 2, 3]), [3, 1, 2], T([3, 1, 2])),
    "uint8": (pa.array([1, 2, 3], pa.uint8()), [3, 1, 2], T([3, 1, 2], dtype=torch.uint8)),
    "float32": (pa.array([1, 2, 3], pa.float32()), [3.0, 1.0, 2.0], T([3.0, 1, 2])),
    "float64": (pa.array([1.0, 2, 3]), [3.0, 1.0, 2.0], T([3.0, 1, 2], dtype=torch.float64)),
    "float16": (pa.array([1, 2, 3], pa.float16()), [3.0, 1.0, 2.0], T([3.0, 1, 2], dtype=torch.float16)),
    "bool": (pa.array([True, False, True]), [True, True, False], T([True, True, False])),
    "list": (
        pa.array([[1, 2], [], [3]]),
        [T([3]), T([1, 2]), T([], dtype=torch.int64)],
        Ragged(T([3, 1, 2]), T([0, 1, 3, 3])),
    ),
    "large_list": (
        pa.array([[1, 2], [], [3]], pa.large_list(pa.int32())),
        [T([3]).int(), T([1, 2]).int(), T([]).int()],
        Ragged(T([3, 1, 2]).int(), T([0, 1, 3, 3])),
    ),
    "list_of_bools": (
        pa.array([[True, False], [], [True]]),
        [T([True]), T([True, False]), T([], dtype=torch.bool)],
        Ragged(T([True, True, False]), T([0, 1, 3, 3])),
    ),
    "list_of_lists": (
        pa.array([[[1], [2, 3]], [], [[4]]]),
        [[T([4])], [T([1]), T([2, 3])], []],
        Ragged(Ragged(T([4, 1, 2, 3]), T([0, 1, 2, 4])), T([0, 1, 3, 3])),
    ),
    "fixed_size_list": (
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
        [T([5.0, 6]), T([1.0, 2]), T([3.0, 4])],
        T([[5.0, 6], [1, 2], [3, 4]]),
    ),
    "list_of_fixed_size_lists": (
        pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int64(), 2))),
        [[T([3, 4]), T([5, 6])], [T([1, 2])], []],
        Ragged(T([[3, 4], [5, 6], [1, 2]]), T([0, 2, 3, 3])),
    ),
    "text": (pa.array(["a", None, "c"]), ["c", "a", None], ["c", "a", None]),
    "bytes": (pa.array([b"a", b"", b"\xff"]), [b"\xff", b"a", b""], [b"\xff", b"a", b""]),
    "list_of_texts": (pa.array([["a"], [], ["b", None]]), [["b", None], ["a"], []], [["b", None], ["a"], []]),
    "struct": (pa.array([{"a": 1}, {"a": 2}, None]), [None, {"a": 1}, {"a": 2}], [None, {"a": 1}, {"a": 2}]),
    "map": (
        pa.array([[("a", 1)], [], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
        [[("b", 2)], [("a", 1)], []],
        [[("b", 2)], [("a", 1)], []],
    ),
    "time": (pa.array([DAY] * 3), [DAY] * 3, [DAY] * 3),
    "decimal": (pa.array([Decimal("1.5")] * 3), [Decimal("1.5")] * 3, [Decimal("1.5")] * 3),
    "nothing": (pa.nulls(3), [None] * 3, [None] * 3),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_values_of_every_type_in_the_order_of_the_pieces(name):
    array, items, column = COLUMNS[name]
    rows = rows_of({"x": array}, [2, 0, 1])
    assert same([row["x"] for row in rows], items)
    assert same(rows.columns["x"], column)
    assert same(rows_of({"x": array})[1:].columns["x"], rows_of({"x": array}, [1, 2]).columns["x"])


@pytest.mark.parametrize("name", COLUMNS)
def test_no_rows_have_columns_of_the_same_type(name):
    array = COLUMNS[name][0]
    schema = pa.schema([("x", array.type)])
    none, some = Rows([], schema).columns["x"], rows_of({"x": array}).columns["x"]
    while isinstance(some, Ragged):
        assert none.offsets.tolist() == [0]
        none, some = none.values, some.values
    assert type(none) is type(some)
    assert len(none) == 0
    if isinstance(some, torch.Tensor):
        assert (none.dtype, none.shape[1:]) == (some.dtype, some.shape[1:])


def tensors_of(column):
    return [column] if isinstance(column, torch.Tensor) else [*tensors_of(column.values), column.offsets]


@pytest.mark.parametrize(
    "name", [name for name, (_, _, column) in COLUMNS.items() if type(column) is not list]
)
def test_tensors_are_contiguous_and_own_their_memory(name):
    rows = rows_of({"x": COLUMNS[name][0]})
    before = digest(rows)
    for tensor in [
        *tensors_of(rows.columns["x"]),
        *(x for x in [rows[0]["x"]] if isinstance(x, torch.Tensor)),
    ]:
        assert tensor.is_contiguous()
        tensor.zero_()  # and not what another asks for later
    assert digest(rows) == before


@pytest.mark.parametrize("array", [pa.array([1, None]), pa.array([[1], None]), pa.array([[1], [2, None]])])
def test_a_null_among_numbers_is_no_tensor(array):
    rows = rows_of({"x": array, "y": [1, 2]})
    with pytest.raises(
        DataError, match=r"Column 'x' has nulls in these rows \(1\).* collate the rows as dicts"
    ):
        rows.columns["x"]
    assert rows.columns["y"].tolist() == [1, 2]
    assert rows[:1].columns["x"] is not None  # these rows have none
    assert rows[1]["x"] == array[1].as_py()


def test_a_slice_is_rows_again():
    rows = rows_of({"x": [0, 1, 2, 3]})
    for chosen in (slice(1, 3), slice(None, None, -1), slice(4, None), slice(-2, None)):
        assert rows[chosen].columns["x"].tolist() == [0, 1, 2, 3][chosen]
    assert rows[-1] == {"x": 3}
    with pytest.raises(IndexError):
        rows[4]


@pytest.mark.parametrize("columns", [["n"], ["n", "s"], ["s", "n"]])
def test_columns_may_come_as_fields(columns):
    numbers = np.array([(1,), (2,), (3,)], [("n", np.float32)])
    texts = pa.record_batch({"s": ["a", "b", "c"]}).select([name for name in columns if name == "s"])
    schema = pa.schema([("n", pa.float32()) if name == "n" else ("s", pa.string()) for name in columns])
    rows = Rows([texts], schema, numbers)
    assert len(rows) == 3
    assert list(rows.columns) == list(rows[0]) == columns
    assert rows[1] == {name: {"n": 2.0, "s": "b"}[name] for name in columns}
    assert same(rows.take([2, 0]).columns["n"], T([3.0, 1.0]))
    assert [row.get("s") for row in rows[1:]] == (["b", "c"] if "s" in columns else [None] * 2)
    assert len(rows[3:]) == len(rows[3:].columns["n"]) == 0
    rows.columns["n"].zero_()  # it has memory of its own
    assert list(pickle.loads(pickle.dumps(rows))) == list(rows)
    assert rows[0]["n"] == 1.0


def test_a_single_piece_leaves_the_rest_of_its_chunk_behind():
    lists = rows_of({"x": [[1, 2], [3], [4]]}, [1]).columns["x"]
    assert same(lists, Ragged(T([3]), T([0, 1])))


def test_the_default_collate_takes_the_columns():
    batch = collate(rows_of({"x": [1, 2], "l": [[1], [2, 3]], "s": ["a", "b"]}))
    assert list(batch) == ["x", "l", "s"]
    assert batch["l"].lengths.tolist() == [1, 2]
    assert batch["s"] == ["a", "b"]


def test_rows_travel_between_processes():
    rows = rows_of({"x": list(range(1000)), "l": [[1]] * 1000}, [3, 4])
    pickled = pickle.dumps(rows)
    assert len(pickled) < 2000  # and not the chunk that they were cut from
    assert digest(pickle.loads(pickled)) == digest(rows)
