"""Lines, documents and whole files are texts."""

import gzip

import pytest

from lanewise.data import TextDataset
from lanewise.errors import DataError


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("\n", ["one", "t\u00e4wo", "three", "  "]),
        ("\n\n", ["one\nt\u00e4wo", "three\r\n  \n"]),
        ("\u00e4", ["one\nt", "wo\n\nthree\r\n  \n"]),
        (None, ["one\nt\u00e4wo\n\nthree\r\n  \n"]),
    ],
)
def test_samples_are_texts_between_separators(tmp_path, separator, expected):
    path = tmp_path / "a.txt"
    path.write_bytes("one\nt\u00e4wo\n\nthree\r\n  \n".encode())
    dataset = TextDataset(path, separator=separator, cache_dir=tmp_path / "cache", memory_mib=16)
    assert list(dataset) == expected
    assert (tmp_path / "cache").exists() == (separator is not None)


def test_lines_are_the_default(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb")
    assert list(TextDataset(tmp_path / "a.txt", cache_dir=tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("separator", "expected"),
    [("\n", ["one", "\ufefftwo"]), ("\r\n", ["one", "\ufefftwo"]), (None, ["\r\none\r\n\ufefftwo\r\n"])],
)
def test_a_byte_order_mark_is_no_part_of_the_first_text(tmp_path, suffix, separator, expected):
    path = tmp_path / f"a.txt{suffix}"
    with gzip.open(path, "wb") if suffix else path.open("wb") as file:
        file.write("\ufeff\r\none\r\n\ufefftwo\r\n".encode())
    assert list(TextDataset(path, separator=separator, cache_dir=tmp_path)) == expected


def test_a_file_of_a_byte_order_mark_alone_holds_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(DataError, match="holds no record that is not empty"):
        TextDataset(tmp_path / "a.txt", cache_dir=tmp_path)


def test_a_text_that_is_no_utf_8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n ab\xe9cd\nalso")
    with pytest.raises(
        DataError, match=r"a\.txt, byte 8: 'utf-8' codec can't decode byte 0xe9.*b' ab\\xe9cd'"
    ):
        TextDataset(path, cache_dir=tmp_path)[1]
    dataset = TextDataset(path, cache_dir=tmp_path, on_error="skip")
    assert dataset.__getitems__([0, 1, 2]) == ["fine", "also"]


@pytest.mark.parametrize(
    ("separator", "message"),
    [
        (b"\n", r"separator is b'\\n', of type bytes\. It is a str, or None"),
        (7, "separator is 7, of type int"),
        ("\ud800", "UTF-8 cannot write: surrogates not allowed"),
        ("", "The separator is empty"),
    ],
)
def test_a_wrong_separator_is_refused(tmp_path, separator, message):
    (tmp_path / "a.txt").write_text("a\nb")
    with pytest.raises(DataError, match=message):
        TextDataset(tmp_path / "a.txt", separator=separator, cache_dir=tmp_path)
