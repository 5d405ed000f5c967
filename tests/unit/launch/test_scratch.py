"""Folders that are gone when their process is, at the latest when the next one is made."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lanewise.errors import StorageError
from lanewise.launch import scratch
from lanewise.launch.scratch import remove_all, scratch_folder

KILLED = """
import os, signal
from lanewise.launch.scratch import scratch_folder
with scratch_folder():
    os.kill(os.getpid(), signal.SIGKILL)
"""
WITH_SOCKETS = """
import multiprocessing.util, tempfile
from lanewise.launch.scratch import folder_until_exit
folder_until_exit()
print(multiprocessing.util.get_temp_dir(), tempfile.gettempdir(), flush=True)
"""


@pytest.fixture
def folder(monkeypatch):
    """Where temporary files are; the name of a socket is short, so not in tmp_path.

    The folders that this process has from other tests stay: its loader processes keep sockets there.
    """
    monkeypatch.setattr(scratch, "_folders", {})
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {"TMPDIR": str(folder), "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False
    )


def test_folders_in_use_stay_and_are_removed_in_the_end(folder):
    with scratch_folder() as first, scratch_folder() as second:
        (first / "file").touch()
        assert {first, second} == set(folder.iterdir())
    assert not list(folder.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_nothing_else(folder):
    others = {folder / "pymp-of-another-program", folder / "lanewise-of-a-user", folder / "lanewise-on-b"}
    for other in others:
        other.mkdir()
    (folder / "lanewise-on-b" / "lock").write_text("another machine")
    assert run(KILLED, folder).returncode == -9
    (left,) = set(folder.iterdir()) - others
    assert left.name.startswith("lanewise-")
    with scratch_folder() as own:
        assert set(folder.iterdir()) == {own, *others}


def test_what_a_killed_process_left_is_removed_by_one_that_ends(folder):
    assert run(KILLED, folder).returncode == -9
    assert len(list(folder.iterdir())) == 1
    remove_all()
    assert not list(folder.iterdir())


def test_the_sockets_of_multiprocessing_lie_in_it_and_the_users_files_do_not(folder):
    done = run(WITH_SOCKETS, folder)
    assert (done.returncode, done.stderr) == (0, "")
    sockets, temporary = map(Path, done.stdout.split())
    assert sockets.parent.name.startswith("lanewise-")
    assert sockets.parent.parent == temporary == folder
    assert not list(folder.iterdir())


def test_sockets_whose_names_would_be_too_long_stay_where_they_were(folder):
    deep = folder / ("d" * 60)
    deep.mkdir()
    done = run(WITH_SOCKETS, deep)
    assert Path(done.stdout.split()[0]).parent == deep
    assert not list(deep.iterdir())


def test_no_place_for_temporary_files_is_one_error(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    with (
        pytest.raises(StorageError, match=r"^there is no place for temporary files: .*/missing.* Set TMPDIR"),
        scratch_folder(),
    ):
        pass


def test_a_file_system_without_locks_has_folders_too(folder, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch_folder() as first, scratch_folder() as second:
        assert {first, second} == set(folder.iterdir())
    assert not list(folder.iterdir())
