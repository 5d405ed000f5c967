"""Paths, patterns and URLs become files, in the same order everywhere."""

import fsspec
import pytest

from lanewise.data.source_files import find_files, is_remote
from lanewise.errors import DataError


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "c.json", "[1].txt", ".hidden.txt", "deep/er/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    return tmp_path


def names(files, folder):
    return [file.removeprefix(f"{folder}/") for file in files]


def test_a_pattern_finds_files_sorted_by_name_without_hidden_ones_and_folders(folder):
    assert names(find_files(folder / "*.txt"), folder) == ["[1].txt", "a.txt", "b.txt"]
    assert names(find_files(str(folder / "**/*.txt")), folder) == [
        "[1].txt",
        "a.txt",
        "b.txt",
        "deep/er/d.txt",
    ]


def test_several_paths_stay_in_their_order(folder):
    assert names(find_files([folder / "c.json", str(folder / "?.txt")]), folder) == [
        "c.json",
        "a.txt",
        "b.txt",
    ]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(folder):
    assert names(find_files(folder / "[1].txt"), folder) == ["[1].txt"]


def test_paths_are_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    expected = [str(folder / "a.txt")]
    for path in ("a.txt", "~/a.txt", "a.*", f"file://{folder}/a.txt"):
        assert find_files(path) == expected


def test_a_url_stays_and_its_pattern_is_expanded():
    memory = fsspec.filesystem("memory")
    for name in ("b", "a"):
        memory.pipe_file(f"/source_files/{name}.txt", b"x")
    assert is_remote("memory://source_files/a.txt")
    assert find_files("memory://source_files/a.txt") == ["memory://source_files/a.txt"]
    found = find_files("memory://source_files/*.txt")
    assert [fsspec.open(url).open().read() for url in found] == [b"x", b"x"]
    assert [url[-5:] for url in found] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.txt", r"gone\.txt does not exist.*it is relative to"),
        ("gone*.txt", r"gone\*\.txt finds no file"),
        ("deep", r"deep is a folder.*deep/\*"),
        ("memory://source_files_gone/*", "finds no file"),
        ("unheard://of/*", r"unheard://of/\* cannot be listed"),
        ([], "sequence of paths is empty"),
    ],
)
def test_what_names_no_file_is_refused(folder, monkeypatch, path, message):
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=message):
        find_files(path)
