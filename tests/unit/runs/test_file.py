"""Nothing is read from or written to anything but a regular file, and what the disk refuses is one error."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from lanewise.errors import StorageError
from lanewise.runs.file import (
    JsonLines,
    json_object,
    open_log,
    open_regular,
    replace_text,
    replacing,
    writing,
)


def test_a_log_grows_and_keeps_its_lines(tmp_path):
    for line in ("a\n", "b\n"):
        with open_log(tmp_path / "log") as file:
            file.write(line)
    assert (tmp_path / "log").read_text() == "a\nb\n"


def test_lines_that_would_be_lost_with_their_file_are_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    lines = JsonLines(tmp_path / "run" / "metrics.jsonl")
    lines.write({"step": 1})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written: it was moved or removed"):
        lines.write({"step": 2})


def test_lines_that_would_go_on_in_a_moved_folder_are_an_error(tmp_path):
    """Another run may have taken its name, and the rest of this one would be written there."""
    (tmp_path / "run").mkdir()
    lines = JsonLines(tmp_path / "run" / "metrics.jsonl")
    lines.write({"step": 1})
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("of another run\n")
    with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written: it was moved or removed"):
        lines.write({"step": 2})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "of another run\n"


@pytest.mark.parametrize(
    ("line", "columns"),
    [
        (b'{"a": 1}\n', {"a": 1}),
        (' {"\u00e9": 1} '.encode(), {"\u00e9": 1}),
        (b'{"a": 1} 2', None),
        (b"[1]", None),
        (b"", None),
        (b"\xff", None),
        (b'{"a": ' + b"1" * 6000 + b"}", None),
        (b"[" * 10**5, None),
    ],
    ids=["object", "spaces", "more", "list", "empty", "no text", "digits", "deep"],
)
def test_a_line_is_an_object_or_none(line, columns):
    assert json_object(line) == columns


def plant(path: Path, kind: str) -> None:
    if kind == "link":
        path.symlink_to(path.with_name("precious"))
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_nothing_else_is_written_to(tmp_path, kind):
    (tmp_path / "precious").write_text("mine")
    plant(tmp_path / "log", kind)
    with pytest.raises(StorageError, match=r"log cannot be written: "), writing(tmp_path / "log"):
        open_log(tmp_path / "log")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_nothing_else_is_read(tmp_path, kind):
    (tmp_path / "precious").write_text("mine")
    plant(tmp_path / "file", kind)
    with pytest.raises(OSError):  # noqa: PT011 - of the system
        open_regular(tmp_path / "file")


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    plant(tmp_path / "config", "link")
    plant(tmp_path / ".config.tmp", "link")
    replace_text(tmp_path / "config", "new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "config").is_symlink()
    assert (tmp_path / "config").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "precious"]


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path):
    def write_half(new: Path) -> None:
        new.write_text("half")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError), replacing(tmp_path / "model") as new:
        write_half(new)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_with_the_file_and_the_free_space(tmp_path):
    path = tmp_path / "not" / "there"
    with pytest.raises(StorageError) as caught, writing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = str(caught.value)
    assert said.startswith(f"{path} cannot be written: No space left on device, ")
    assert said.endswith(f" MiB are free in {tmp_path}.")
