"""Which files there are."""

import io
import itertools
import socket
import tarfile
from pathlib import Path

import fsspec
import pytest

from lanewise.data.byte_file import ByteFile
from lanewise.data.source_file import file_name, list_files
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
    assert [Path(path).name for path in list_files(f"{root}/*.x")] == ["a.x", "b.x"]
    assert list_files([c, b, a]) == [c, b, a]
    assert [Path(path).name for path in list_files([c, f"{root}/[ab].*"])] == ["c.y", "a.x", "b.x"]
    assert list_files(a) == [a]


def test_a_path_may_be_a_path_and_have_brackets(tmp_path):
    path = tmp_path / "a[1].x"
    path.write_bytes(b"1")
    assert list_files(path) == [str(path)]


def test_a_glob_in_a_chained_url_keeps_the_rest_of_the_chain(tmp_path):
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("one.x", "in/two.x", "in/three.x"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert list_files(f"tar://in/*.x::{archive}") == [
        f"tar://in/three.x::{archive}",
        f"tar://in/two.x::{archive}",
    ]
    assert list_files(f"tar://*.x::file://{archive}") == [f"tar://one.x::file://{archive}"]
    assert list_files(f"simplecache::file://{tmp_path}/*.tar") == [f"simplecache::file://{archive}"]


def test_names_that_were_found_are_no_parts_of_a_url(tmp_path, monkeypatch):
    """A name in a folder or a bucket chose another file to read, or a server to call."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "std::a.x").write_text("a")
    assert list_files("*.x") == [str(tmp_path / "std::a.x")]
    assert ByteFile.find(str(tmp_path / "std::a.x")).size == 1
    with pytest.raises(DataError, match=r"matches .*std::a\.x, of which a part would be read as a URL"):
        list_files(f"file://{tmp_path}/*.x")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/b::c.gz", "/a/b::c.gz"),
        ("a/b.gz", "a/b.gz"),
        ("s3://a/b.gz", "s3://a/b.gz"),
        ("tar://a.x::b.tar.gz", "tar://a.x"),
        ("simplecache::tar://a.x::s3://b.tar", "tar://a.x"),
        ("simplecache::a.gz", "a.gz"),
    ],
)
def test_what_names_the_file(path, name):
    assert file_name(path) == name


def test_a_glob_that_matches_nothing_is_refused(folder):
    root, _ = folder
    with pytest.raises(DataError, match=r"No file matches .*/\*\.parquet\. The working directory is /"):
        list_files(f"{root}/*.parquet")


def test_a_folder_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(DataError, match=rf"is a folder\. Name the files in it, as in {tmp_path}/\*"):
        list_files(tmp_path)


@pytest.mark.parametrize("paths", [None, 7, b"a", [None], ["a", b"a"]])
def test_what_is_no_path_is_refused(paths):
    with pytest.raises(DataError, match=r"is not a path: it is of type \w+\. Give a str or a Path"):
        list_files(paths)


def test_no_paths_are_refused():
    with pytest.raises(DataError, match="has no files: paths is empty"):
        list_files([])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of fsspec's FTPFileSystem
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://a", r"nowhere://a cannot be opened: ValueError: .*nowhere"),
        ("tar://a::/nope", r"tar://a::/nope cannot be opened: \w+: "),
        ("ftp://", r"ftp:// cannot be opened: \w+: "),
        ("zip://*.txt::/nope", r"zip://\*\.txt::/nope cannot be opened: \w+: "),
        ("github://a:b@c/*", r"github://a:b@c/\* cannot be opened: \w+: "),
    ],
)
def test_a_url_that_cannot_be_opened_is_refused(url, message, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no network in a test")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(DataError, match=message):
        list_files(url)
