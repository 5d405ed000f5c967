"""Each line of a file is a JSON value."""

import gzip
import json

import pytest

from lanewise.data import JsonLinesDataset
from lanewise.errors import DataError

VALUES = [{"a": 1, "text": "\u00e4\n"}, [1, 2.5, None], "x", 3, True, {}]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_samples_are_what_json_gives(tmp_path, suffix):
    lines = "\r\n\n".join(
        json.dumps(value, ensure_ascii=index % 2 == 0) for index, value in enumerate(VALUES)
    )
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(lines.encode()) if suffix else lines.encode())
    dataset = JsonLinesDataset(str(tmp_path / "*.jsonl*"), cache_dir=tmp_path / "cache", memory_mib=16)
    assert list(dataset) == VALUES
    assert dataset.__getitems__([5, 0]) == [VALUES[5], VALUES[0]]
    assert (tmp_path / "cache").is_dir()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"a": }',
            r"byte 5: it is not JSON: Expecting value \(character 6\)\. The record begins: b'{\"a\": }'",
        ),
        (b'"\xff"', r"byte 6: 'utf-8' codec can't decode byte 0xff"),
        (b"  ", "it is not JSON: Expecting value"),
        (b"[" * 100_000, "it is nested more than 200 deep"),
    ],
)
def test_a_line_that_is_no_json(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1234\n" + line + b"\n5")
    with pytest.raises(DataError, match=message):
        JsonLinesDataset(path, cache_dir=tmp_path).__getitems__([0, 1, 2])
    dataset = JsonLinesDataset(path, cache_dir=tmp_path, on_error="skip")
    assert dataset.__getitems__([0, 1, 2]) == [1234, 5]
    assert dataset.num_skipped == 1


@pytest.mark.parametrize(
    "line",
    [
        b' {"a": 1, "a": 2}\t',
        b"\xef\xbb\xbf[1]",
        '{"a": "\u00e4"}'.encode("utf-16"),
        "12".encode("utf-16-le"),
        "[1]".encode("utf-32-be"),
        json.dumps("\ud800", ensure_ascii=False).encode("utf-8", "surrogatepass"),
        b"[1e400, -0.0, 12345678901234567890]",
    ],
)
def test_lines_in_any_encoding_are_what_json_gives(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line)
    assert repr(JsonLinesDataset(path, cache_dir=tmp_path)[0]) == repr(json.loads(line))


@pytest.mark.parametrize("line", [b"1 2", b"{} x", b'{"a": 1}}'])
def test_more_than_one_value_is_no_json(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataError, match=r"it is not JSON"):
        JsonLinesDataset(path, cache_dir=tmp_path)[0]


def called_from(depth, function):
    """Call a function from within so many other calls."""
    return called_from(depth - 1, function) if depth else function()


@pytest.mark.parametrize("calls", [0, 300, 600])
def test_which_lines_are_left_out_does_not_depend_on_where_they_are_read(tmp_path, calls):
    depths = [1, 150, 199, 200, 201, 300, 850, 900, 990, 1100]
    lines = [b"[" * depth + b"]" * depth for depth in depths]
    flat = [
        json.dumps([[{}]] * 500),
        json.dumps("[" * 5000 + '"\\'),
        json.dumps({"[": ["\\" * 9 + "[" * 300]}),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, *(line.encode() for line in flat)]))
    dataset = JsonLinesDataset(tmp_path / "a.jsonl", cache_dir=tmp_path, on_error="skip")
    read = called_from(calls, lambda: dataset.__getitems__(list(range(len(dataset)))))
    assert [json.dumps(value).count("[") for value in read[:4]] == [1, 150, 199, 200]
    assert [json.dumps(value) for value in read[4:]] == flat
    assert dataset.num_skipped == 6


def test_the_error_of_a_line_that_is_nested_too_deep(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a":' * 201 + b"1" + b"}" * 201)
    with pytest.raises(DataError, match=r"a\.jsonl, byte 0: it is nested more than 200 deep\..*'skip'"):
        JsonLinesDataset(tmp_path / "a.jsonl", cache_dir=tmp_path)[0]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\r\n[1]\r\n[2]")
    assert list(JsonLinesDataset(tmp_path / "a.jsonl", cache_dir=tmp_path)) == [[1], [2]]
