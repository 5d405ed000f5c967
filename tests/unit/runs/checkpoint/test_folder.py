"""Which checkpoints of a folder are good, and which may go."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanewise.errors import CheckpointError, StorageError
from lanewise.runs.checkpoint.folder import CheckpointFolder, read_good
from lanewise.runs.checkpoint.manifest import Manifest, write_durably


def make(folder: CheckpointFolder, step: int, metric: float | None = None, content: bytes = b"{}") -> Path:
    temporary = folder.temporary(step, "abc")
    temporary.mkdir(parents=True)
    Manifest(step, metric, {}, (write_durably(temporary / "state.json", content),)).write(temporary)
    folder.publish(temporary, step)
    return folder.of_step(step)


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def break_state(path: Path) -> str:
    (path / "state.json").write_bytes(b"[]")
    return "state.json is damaged"


def cut_state(path: Path) -> str:
    (path / "state.json").write_bytes(b"")
    return "state.json has 0 bytes instead of 2"


def remove_state(path: Path) -> str:
    (path / "state.json").unlink()
    return "state.json cannot be read"


def add_file(path: Path) -> str:
    (path / "notes.txt").touch()
    return "notes.txt does not belong"


def remove_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "has no manifest.json"


def cut_manifest(path: Path) -> str:
    (path / "manifest.json").write_bytes(b'{"format": 1, ')
    return "manifest.json cannot be read"


def sign_nonsense(path: Path) -> str:
    """Write what has a right checksum, and a number beyond every float."""
    tree = json.loads((path / "manifest.json").read_bytes())
    tree["manifest"]["metric"] = 10**400
    tree["sha256"] = hashlib.sha256(json.dumps(tree["manifest"], sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(tree))
    return "manifest.json cannot be read: ValueError"


def put_file(path: Path) -> str:
    shutil.rmtree(path)
    path.touch()
    return "cannot be read"


DAMAGES = [
    break_state,
    cut_state,
    remove_state,
    add_file,
    remove_manifest,
    cut_manifest,
    sign_nonsense,
    put_file,
]


def test_no_folder_and_an_empty_one_have_no_checkpoint(folder):
    assert folder.newest_good(pytest.fail) is None
    assert folder.all() == []
    folder.path.mkdir()
    assert folder.newest_good(pytest.fail) is None


PLANTED: dict[str, Callable[[Path], object]] = {
    "file": Path.touch,
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_folder_that_cannot_be_read_is_said(folder, kind):
    """It must not pass for one without checkpoints: the run would start anew."""
    PLANTED[kind](folder.path)
    for read in (folder.newest_good, folder.remove_leftovers):
        with pytest.raises(CheckpointError, match="checkpoints cannot be read: "):
            read(pytest.fail)


def test_a_folder_whose_name_is_too_long_is_said(folder):
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        CheckpointFolder(folder.path.with_name("n" * 300)).newest_good(pytest.fail)


def test_a_leftover_that_cannot_be_removed_is_said(folder, monkeypatch):
    (folder.path / "step-000002.tmp-abc").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StorageError, match=r"step-000002\.tmp-abc cannot be written: Permission denied"):
        folder.remove_leftovers(pytest.fail)


def refuse(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_checkpoints_are_listed_by_number(folder):
    for step in (999_999, 5, 1_000_000, 10):
        make(folder, step)
    assert [path.name for path in folder.all()] == [
        "step-1000000",
        "step-999999",
        "step-000010",
        "step-000005",
    ]


def test_the_newest_good_one_is_found_without_a_warning(folder):
    for step in (2, 4):
        make(folder, step)
    path, manifest = folder.newest_good(pytest.fail)
    assert (path, manifest.step) == (folder.of_step(4), 4)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_one_is_skipped_with_the_reason(folder, damage):
    for step in (2, 4):
        make(folder, step)
    reason = damage(folder.of_step(4))
    warnings: list[str] = []
    path, _ = folder.newest_good(warnings.append)
    assert path == folder.of_step(2)
    (warning,) = warnings
    assert warning.startswith("skipping a checkpoint: ")
    assert reason in warning
    assert "step-000004" in warning


def test_several_bad_ones_are_skipped(folder):
    make(folder, 1)
    for step, damage in enumerate(DAMAGES, start=2):
        damage(make(folder, step))
    warnings: list[str] = []
    path, _ = folder.newest_good(warnings.append)
    assert path == folder.of_step(1)
    assert len(warnings) == len(DAMAGES)


def test_all_bad_is_an_error_and_nothing_is_deleted(folder):
    for step, damage in enumerate(DAMAGES, start=1):
        damage(make(folder, step))
    before = sorted(folder.path.rglob("*"))
    warnings: list[str] = []
    message = rf"none of the {len(DAMAGES)} checkpoints in .* is good\. Nothing was deleted"
    with pytest.raises(CheckpointError, match=message):
        folder.newest_good(warnings.append)
    assert len(warnings) == len(DAMAGES)
    assert sorted(folder.path.rglob("*")) == before


FOREIGN = [
    "step-12",
    "step-000002.bak",
    "step-000002.tmp",
    "xstep-000002.tmp-abc",
    "step-000002.tmp-abc.x",
    "latest",
]


def test_leftovers_are_removed_and_only_these(folder):
    make(folder, 2)
    for name in [*FOREIGN, "step-000002.tmp-0a1b2c3d", "step-000004.old-0a1b2c3d", "step-000001.old-pruned"]:
        (folder.path / name / "inner").mkdir(parents=True)
    (folder.path / "step-000009.txt").touch()
    folder.remove_leftovers(lambda _: None)
    assert names(folder) == sorted([*FOREIGN, "step-000002", "step-000009.txt"])


def plant(folder: CheckpointFolder, elsewhere: Path) -> list[str]:
    """Put what looks like a checkpoint or a leftover beside the checkpoints; return its names."""
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (folder.path / "step-000004.tmp-0a1b2c3d").symlink_to(elsewhere)
    (folder.path / "step-000004.old-0a1b2c3d").touch()
    (folder.path / "step-000002.old-pruned").touch()
    (folder.path / "step-0000004").mkdir()
    (folder.path / "step-\u0660\u0660\u0660\u0660\u0660\u0664").mkdir()
    return sorted(path.name for path in folder.path.iterdir() if path.name != "step-000002")


def test_strange_entries_are_left_alone_named_once_and_in_nobodys_way(folder, tmp_path):
    make(folder, 2)
    planted = plant(folder, tmp_path / "elsewhere")
    said: list[str] = []
    folder.remove_leftovers(said.append)
    (warning,) = said
    assert all(name in warning for name in planted)
    assert folder.newest_good(pytest.fail)[1].step == 2
    for step in (4, 6):
        make(folder, step)
        folder.prune(step, keep_last=1, keep_best=0, sign=1)
    assert names(folder) == sorted([*planted, "step-000006"])
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_checkpoint_that_was_moved_and_linked_is_read_and_never_removed(folder, tmp_path):
    make(folder, 2).rename(tmp_path / "moved")
    folder.of_step(2).symlink_to(tmp_path / "moved")
    assert folder.newest_good(pytest.fail) is not None
    make(folder, 4)
    folder.prune(4, keep_last=1, keep_best=0, sign=1)
    assert names(folder) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_has_the_name_of_a_new_checkpoint_gives_way(folder, tmp_path, kind):
    folder.path.mkdir()
    if kind == "link":
        folder.of_step(4).symlink_to(tmp_path)
    else:
        folder.of_step(4).write_text("precious")
    make(folder, 4)
    assert folder.newest_good(pytest.fail)[1].step == 4
    assert len(names(folder)) == 2


@pytest.mark.parametrize("moment", ["read", "verify"])
def test_one_that_is_pruned_while_it_is_read_is_not_damaged(folder, monkeypatch, moment):
    """A live run may remove the checkpoint that another command is just reading."""
    for step in (2, 4):
        make(folder, step)
    original = getattr(Manifest, moment)

    def prune_first(*args: Any) -> Any:
        folder.prune(4, keep_last=1, keep_best=0, sign=1)
        return original(*args)

    found = folder.read()
    assert next(found)[1].step == 4
    monkeypatch.setattr(Manifest, moment, prune_first)
    assert list(found) == []


def test_newer_ones_are_found_when_all_others_went_meanwhile(folder, monkeypatch):
    make(folder, 2)
    read = CheckpointFolder.all

    def read_late(self: CheckpointFolder) -> list[Path]:
        monkeypatch.setattr(CheckpointFolder, "all", read)
        paths = read(self)
        make(folder, 4)
        folder.prune(4, keep_last=1, keep_best=0, sign=1)
        return paths

    monkeypatch.setattr(CheckpointFolder, "all", read_late)
    assert folder.newest_good(pytest.fail)[1].step == 4


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder"])
def test_what_is_no_regular_file_is_never_read(folder, tmp_path, name, kind):
    path = make(folder, 4) / name
    (tmp_path / name).write_bytes(path.read_bytes())
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(tmp_path / name)
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is"):
        read_good(path.parent)


def test_a_leftover_is_no_checkpoint(folder):
    make(folder, 2)
    shutil.copytree(folder.of_step(2), folder.temporary(4, "abc"))
    shutil.copytree(folder.of_step(2), folder.path / "step-000006.old-abc")
    path, _ = folder.newest_good(pytest.fail)
    assert path == folder.of_step(2)


def test_no_folder_has_no_leftovers(folder):
    folder.remove_leftovers(pytest.fail)
    assert not folder.path.exists()


METRICS = [0.3, 0.9, None, 0.1, 0.5, 0.4]


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "sign", "kept"),
    [
        (1, 0, 1, [6]),
        (3, 0, 1, [4, 5, 6]),
        (9, 0, 1, [1, 2, 3, 4, 5, 6]),
        (1, 1, 1, [2, 6]),
        (1, 2, 1, [2, 5, 6]),
        (1, 1, -1, [4, 6]),
        (1, 2, -1, [1, 4, 6]),
        (2, 2, -1, [1, 4, 5, 6]),
        (1, 9, 1, [1, 2, 4, 5, 6]),
    ],
)
def test_the_newest_and_the_best_are_kept(folder, keep_last, keep_best, sign, kept):
    for step, metric in enumerate(METRICS, start=1):
        make(folder, step, metric)
    folder.prune(6, keep_last=keep_last, keep_best=keep_best, sign=sign)
    assert names(folder) == [f"step-{step:06d}" for step in kept]


@pytest.mark.parametrize(
    ("jumps", "kept"),
    [([4], [3, 6]), ([3, 4], [2, 3, 6]), ([1], [6]), ([9], [6]), ([2, 3, 4, 5], [2, 3, 4, 6])],
)
def test_the_newest_before_each_of_the_last_jumps_is_kept(folder, jumps, kept):
    for step in range(1, 7):
        make(folder, step)
    folder.jumps.steps += jumps
    folder.prune(6, keep_last=1, keep_best=0, sign=1)
    assert names(folder) == [f"step-{step:06d}" for step in kept]


def test_later_ones_that_were_damaged_do_not_count(folder):
    for step in (1, 2, 9):
        make(folder, step)
    folder.prune(2, keep_last=1, keep_best=0, sign=1)
    assert names(folder) == ["step-000002", "step-000009"]


def test_of_equal_ones_the_newer_is_kept(folder):
    for step in (1, 2, 3):
        make(folder, step, 0.5 if step < 3 else 0.1)
    folder.prune(3, keep_last=1, keep_best=1, sign=1)
    assert names(folder) == ["step-000002", "step-000003"]


def test_one_without_a_readable_manifest_is_not_among_the_best(folder):
    for step in (1, 2, 3):
        make(folder, step, step / 10)
    remove_manifest(folder.of_step(2))
    folder.prune(3, keep_last=1, keep_best=2, sign=1)
    assert names(folder) == ["step-000001", "step-000003"]


def test_pruning_touches_nothing_else(folder):
    for step in (1, 2):
        make(folder, step)
    (folder.path / "latest").mkdir()
    folder.prune(2, keep_last=1, keep_best=0, sign=1)
    assert names(folder) == ["latest", "step-000002"]


@pytest.mark.parametrize("damage", DAMAGES[:-1])
def test_a_new_one_takes_the_place_of_a_bad_one(folder, damage):
    damage(make(folder, 4))
    make(folder, 4, content=b"[1, 2]")
    path, _ = folder.newest_good(pytest.fail)
    assert (path / "state.json").read_bytes() == b"[1, 2]"
    assert names(folder) == ["step-000004"]
