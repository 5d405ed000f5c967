"""A save that fails or is killed anywhere leaves a good checkpoint, and says what went wrong."""

import errno
import io
import json
import math
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file

from lanewise.errors import CheckpointError, StorageError
from lanewise.processes.watch.heartbeat import OWN_CODE, SAVE, heartbeat
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint import saver
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import FileEntry, Manifest, write_durably
from lanewise.runs.checkpoint.part import Staging
from lanewise.runs.checkpoint.saver import Saver, load_state
from lanewise.testing import run_distributed

OLD, LAST, NEW, NEXT = 2, 4, 6, 8


def make_saver(path: Path, keep_last: int = 2, keep_best: int = 0, sign: int = 1) -> Saver:
    world = LocalWorld(torch.device("cpu"))
    return Saver(CheckpointFolder(path), world, keep_last=keep_last, keep_best=keep_best, sign=sign)


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.arange(6.0) * step, "count": torch.tensor(step)}, "lr": [0.1, step]}


def save(target: Saver, step: int, metric: float | None = None) -> None:
    target.save(state_of(step), Manifest(step, metric, {"seed": 0}, ()))
    assert target.finish()


def prepare(path: Path, *, has_bad: bool = False) -> None:
    """Make two good checkpoints, and on demand a bad one of the step that is saved next."""
    for step in (OLD, LAST):
        save(make_saver(path), step)
    if has_bad:
        shutil.copytree(path / "step-000004", path / "step-000006")
        (path / "step-000006" / "state.json").write_bytes(b"torn")


def find(path: Path) -> int:
    """Return the step of the newest good checkpoint, which holds what was saved."""
    found = CheckpointFolder(path).newest_good(lambda _: None)
    assert found is not None
    folder, manifest = found
    state = load_state(folder, manifest)
    expected = state_of(manifest.step)
    assert folder == CheckpointFolder(path).of_step(manifest.step)
    assert state["lr"] == expected["lr"]
    assert state["model"].keys() == expected["model"].keys()
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items())
    return manifest.step


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def num_bad(path: Path) -> int:
    """Count what has the name of a checkpoint and is none."""
    count = 0
    for checkpoint in CheckpointFolder(path).all():
        try:
            Manifest.read(checkpoint).verify(checkpoint)
        except CheckpointError:
            count += 1
    return count


class Faults:
    """Stands in for the calls that write: from the n-th on, or at it alone, one fails halfway."""

    def __init__(self, patch: pytest.MonkeyPatch, at: float, act: Callable[[], None], *, stays: bool = False):
        self.at, self.act, self.stays = at, act, stays
        self.calls: list[str] = []
        self._lock = threading.Lock()
        fsync, open_file, rmtree = os.fsync, Path.open, shutil.rmtree

        def open_counted(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "x" not in mode:
                return open_file(path, mode, *args, **kwargs)
            self.point(f"open {path.name}")
            return Counted(open_file(path, mode, *args, **kwargs), self)

        def rmtree_counted(path: Path, *, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                self.point(f"rmtree {path.name}", lambda: next(iter(path.iterdir())).unlink())
            rmtree(path, ignore_errors)

        def fsync_counted(descriptor: int) -> None:
            self.point("fsync")
            fsync(descriptor)

        patch.setattr(os, "fsync", fsync_counted)
        patch.setattr(Path, "open", open_counted)
        patch.setattr(shutil, "rmtree", rmtree_counted)
        for name in ("mkdir", "rename"):
            patch.setattr(Path, name, self._counted(name, getattr(Path, name)))

    @property
    def has_struck(self) -> bool:
        return len(self.calls) >= self.at

    def point(self, call: str, half: Callable[[], object] = lambda: None) -> None:
        with self._lock:
            self.calls.append(call)
            count = len(self.calls)
        if count == self.at:
            half()
        if count == self.at or (self.stays and count > self.at):
            self.act()

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Path, *args: Any, **kwargs: Any) -> Any:
            self.point(f"{name} {path.name}")
            return function(path, *args, **kwargs)

        return counted


class Counted:
    """A file whose writes are counted; one that fails has written half."""

    def __init__(self, file: Any, faults: Faults):
        self._file, self._faults = file, faults

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        self._file.flush()

    def write(self, content: Any) -> int:
        self._faults.point("write", lambda: self._file.write(content[: len(content) // 2]))
        return self._file.write(content)


def fill() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_every_kind_of_call_is_counted(tmp_path, monkeypatch):
    prepare(tmp_path / "c", has_bad=True)
    faults = Faults(monkeypatch, math.inf, fill)
    save(make_saver(tmp_path / "c"), NEW)
    kinds = {call.split()[0] for call in faults.calls}
    assert kinds == {"mkdir", "open", "write", "fsync", "rename", "rmtree"}
    assert faults.calls.count("fsync") == 6  # of three files, the new folder, and the two above it


@pytest.mark.parametrize("has_bad", [False, True], ids=["new", "in the place of a bad one"])
@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_a_save_that_fails_anywhere_says_so_and_leaves_a_good_checkpoint(
    tmp_path, monkeypatch, stays, has_bad
):
    prepare(tmp_path / "template", has_bad=has_bad)
    for number in range(1, 100):
        path = tmp_path / str(number) / "checkpoints"
        shutil.copytree(tmp_path / "template", path)
        target = make_saver(path)
        with monkeypatch.context() as patch:
            faults = Faults(patch, number, fill, stays=stays)
            target.save(state_of(NEW), Manifest(NEW, None, {}, ()))
            target._thread.join()
            if not faults.has_struck:
                assert target.finish()
                break
            with pytest.raises(StorageError, match=r"No space left.*Earlier checkpoints are as they were"):
                target.finish()
        assert find(path) in (LAST, NEW), faults.calls[-1]
        assert not [name for name in names(path) if ".tmp-" in name], faults.calls[-1]
        assert target.finish()  # said once
        save(target, NEXT)  # there is space again
        assert find(path) == NEXT
        CheckpointFolder(path).remove_leftovers(pytest.fail)
        assert len(names(path)) == 2
    assert number > 15


def test_who_waits_for_a_save_says_so_even_between_the_steps_of_an_own_loop(tmp_path, monkeypatch):
    """There any time may pass, so it waited for a part that never came, and nobody reported a stall."""
    target, seen = make_saver(tmp_path), []
    monkeypatch.setattr(heartbeat, "note", (OWN_CODE, 5, None))
    writes, write = threading.Event(), Staging.write

    def write_late(*arguments: Any) -> FileEntry:
        writes.wait()
        seen.append(heartbeat.note)
        return write(*arguments)

    monkeypatch.setattr(Staging, "write", write_late)
    target.save(state_of(NEW), Manifest(NEW, None, {}, ()))
    assert heartbeat.note == (OWN_CODE, 5, None)
    threading.Timer(0.1, writes.set).start()
    assert target.finish()
    assert seen == [(SAVE, 5, None)]
    assert heartbeat.note == (OWN_CODE, 5, None)


def test_a_failure_is_there_without_waiting_for_it(tmp_path, monkeypatch):
    target = make_saver(tmp_path)
    with monkeypatch.context() as patch:
        Faults(patch, 1, fill)
        target.save(state_of(NEW), Manifest(NEW, None, {}, ()))
        target._thread.join()
        assert "checkpoint of step 6 could not be written: No space left" in str(target.failure)
        with pytest.raises(StorageError, match="checkpoint of step 6 could not be written: No space left"):
            target.finish()
    assert target.failure is None


def test_a_save_makes_no_folder_in_the_place_of_a_run_that_was_moved(tmp_path):
    """The lock has moved with the run, so what is there now may be another run's."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    target = make_saver(run / "checkpoints")
    save(target, OLD)
    run.rename(moved)
    save(make_saver(run / "checkpoints"), LAST)
    target.save(state_of(NEW), Manifest(NEW, None, {}, ()))
    with pytest.raises(StorageError, match=rf"of step {NEW} could not be written: it was moved or removed"):
        target.finish()
    assert find(run / "checkpoints") == LAST
    assert find(moved / "checkpoints") == OLD


def test_the_next_save_reports_a_failure(tmp_path, monkeypatch):
    target = make_saver(tmp_path)
    with monkeypatch.context() as patch:
        Faults(patch, 1, fill)
        target.save(state_of(LAST), Manifest(LAST, None, {}, ()))
        with pytest.raises(StorageError, match="checkpoint of step 4"):
            target.save(state_of(NEW), Manifest(NEW, None, {}, ()))


def run_child(function: Callable[[], None]) -> int:
    """Run a function in a forked child; return its exit code."""
    child = os.fork()
    if not child:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def save_until_killed(path: Path, number: int) -> None:
    Faults(pytest.MonkeyPatch(), number, partial(os._exit, 9))
    save(make_saver(path), NEW)


@pytest.mark.parametrize("has_bad", [False, True], ids=["new", "in the place of a bad one"])
def test_a_save_that_is_killed_anywhere_leaves_a_good_checkpoint(tmp_path, has_bad):
    prepare(tmp_path / "template", has_bad=has_bad)
    for number in range(1, 100):
        path = tmp_path / str(number) / "checkpoints"
        shutil.copytree(tmp_path / "template", path)
        code = run_child(partial(save_until_killed, path, number))
        if code == 0:
            break
        assert code == 9
        before = find(path)
        assert before in (LAST, NEW)
        assert num_bad(path) <= has_bad  # nothing that was whole is half now
        CheckpointFolder(path).remove_leftovers(pytest.fail)
        assert not [name for name in names(path) if "." in name]
        assert find(path) == before
        save(make_saver(path), NEW)
        assert find(path) == NEW
        assert names(path) == ["step-000004", "step-000006"]
    assert number > 15


def test_a_first_save_that_is_killed_anywhere_is_none_or_whole(tmp_path):
    for number in range(1, 100):
        path = tmp_path / str(number) / "checkpoints"
        code = run_child(partial(save_until_killed, path, number))
        if code == 0:
            break
        found = CheckpointFolder(path).newest_good(pytest.fail)
        assert found is None or find(path) == NEW
        CheckpointFolder(path).remove_leftovers(pytest.fail)
        save(make_saver(path), NEW)
        assert find(path) == NEW
    assert number > 10


@pytest.mark.parametrize("big", [torch.zeros(2**20), "x" * 2**20], ids=["tensor", "text"])
def test_a_full_disk_is_reported_and_costs_no_checkpoint(small_disk, big):
    path = small_disk / "checkpoints"
    prepare(path)
    target = make_saver(path)
    target.save({"big": big}, Manifest(NEW, None, {}, ()))
    with pytest.raises(
        StorageError,
        match=r"No space left on device, [0-9.]+ of 1.0 MiB are free.*Earlier checkpoints are as they were",
    ):
        target.finish()
    assert find(path) == LAST
    assert names(path) == ["step-000002", "step-000004"]
    save(target, NEW)
    assert find(path) == NEW


def save_too_much_in_two(world, path: str) -> str:
    """Save what the part of one process does not fit for; return what is said."""
    target = Saver(CheckpointFolder(Path(path)), world, keep_last=2, keep_best=0, sign=1)
    save(target, LAST)
    target.save({"a": torch.zeros(2**17), "b": torch.zeros(2**18)}, Manifest(NEW, None, {}, ()))
    with pytest.raises(StorageError) as caught:
        target.finish()
    world.all_gather_tree(None)
    assert names(Path(path)) == ["step-000004"]
    world.all_gather_tree(None)
    save(target, NEW)
    return str(caught.value)


def test_no_process_leaves_what_it_wrote_to_a_full_disk(small_disk):
    said = run_distributed(save_too_much_in_two, 2, str(small_disk / "checkpoints"))
    assert said[0] == said[1]
    assert "checkpoint of step 6 could not be written: No space left on device" in said[0]
    assert find(small_disk / "checkpoints") == NEW


def test_what_was_saved_is_what_was_there_when_save_returned(tmp_path, monkeypatch):
    target = make_saver(tmp_path)
    may_write = threading.Event()
    write = saver.Staging.write
    monkeypatch.setattr(saver.Staging, "write", lambda *args: may_write.wait() and write(*args))
    state = state_of(NEW)
    target.save(state, Manifest(NEW, None, {}, ()))
    state["model"]["weight"].zero_()
    state["lr"][1] = 0
    assert not target.finish(0.01)
    assert not CheckpointFolder(tmp_path).all()
    may_write.set()
    assert target.finish()
    assert find(tmp_path) == NEW


def test_nothing_is_deleted_before_the_new_checkpoint_verified(tmp_path, monkeypatch):
    path = tmp_path / "c"
    prepare(path)
    seen = []
    verify = Manifest.verify

    def look(manifest: Manifest, folder: Path) -> None:
        seen.append((folder.name, names(path)))
        verify(manifest, folder)

    monkeypatch.setattr(Manifest, "verify", look)
    save(make_saver(path, keep_last=1), NEW)
    assert seen == [("step-000006", ["step-000002", "step-000004", "step-000006"])]
    assert names(path) == ["step-000006"]


def test_a_new_checkpoint_that_does_not_verify_costs_no_older_one(tmp_path, monkeypatch):
    path = tmp_path / "c"
    prepare(path)
    publish = CheckpointFolder.publish

    def publish_and_damage(folder: CheckpointFolder, temporary: Path, step: int) -> None:
        publish(folder, temporary, step)
        part = folder.of_step(step) / "part-00000.safetensors"
        part.write_bytes(part.read_bytes()[:-1] + b"\xff")

    target = make_saver(path, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "publish", publish_and_damage)
        target.save(state_of(NEW), Manifest(NEW, None, {}, ()))
        with pytest.raises(StorageError, match=r"step-000006/part-00000\.safetensors is damaged"):
            target.finish()
    assert names(path) == ["step-000002", "step-000004", "step-000006"]
    assert find(path) == LAST


def test_the_newest_and_the_best_are_kept(tmp_path):
    target = make_saver(tmp_path, keep_last=1, keep_best=1, sign=-1)
    for step, metric in enumerate([0.5, 0.2, 0.3, 0.4], start=1):
        save(target, step, metric)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    for _ in range(2):
        save(make_saver(tmp_path), NEW)
    assert names(tmp_path) == ["step-000006"]
    assert find(tmp_path) == NEW


def test_what_cannot_be_saved_is_said_at_once(tmp_path):
    target = make_saver(tmp_path)
    with pytest.raises(CheckpointError, match=r"model/mask cannot be saved: .*sparse_coo"):
        target.save({"model": {"mask": torch.ones(1).to_sparse()}}, Manifest(NEW, None, {}, ()))
    with pytest.raises(CheckpointError, match="scheduler/fn cannot be saved"):
        target.save({"scheduler": {"fn": print}}, Manifest(NEW, None, {}, ()))
    assert target.finish()
    assert not names(tmp_path)


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_does_not_lose_the_checkpoint(tmp_path, metric):
    save(make_saver(tmp_path), NEW, metric)
    assert find(tmp_path) == NEW


def save_in_two(world, path: str) -> list[str]:
    target = Saver(CheckpointFolder(Path(path)), world, keep_last=2, keep_best=0, sign=1)
    for step in (OLD, LAST, NEW):
        save(target, step)
    world.all_gather_tree(None)
    return names(Path(path) / "step-000006")


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_process_writes_its_part(tmp_path, world_size):
    parts = [f"part-{rank:05d}.safetensors" for rank in range(world_size)]
    assert run_distributed(save_in_two, world_size, str(tmp_path))[0] == [
        "manifest.json",
        *parts,
        "state.json",
    ]
    assert find(tmp_path) == NEW
    assert names(tmp_path) == ["step-000004", "step-000006"]
    manifest = json.loads((tmp_path / "step-000006" / "manifest.json").read_bytes())
    assert [entry["name"] for entry in manifest["manifest"]["files"]] == [*parts, "state.json"]


ROWS = (5, 2, 1, 0)


def save_shards(world, path: str) -> dict[str, list[int]]:
    """Save tensors of several numbers of rows, one of them twice, and a plain one; return the own part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))
    sharded = {
        str(rows): distribute_tensor(torch.arange(rows * 3.0).view(rows, 3), mesh, [Shard(0)])
        for rows in ROWS
    }
    state = {"model": {**sharded, "tied": sharded["5"].detach(), "plain": torch.ones(2)}}
    target = Saver(CheckpointFolder(Path(path)), world, keep_last=2, keep_best=0, sign=1)
    target.save(state, Manifest(NEW, None, {}, ()))
    target.finish()
    part = load_file(Path(path) / "step-000006" / f"part-{world.rank:05d}.safetensors")
    return {name: list(tensor.shape) for name, tensor in part.items()}


def test_each_process_writes_its_rows_of_sharded_tensors_and_they_are_read_as_one(tmp_path):
    plain = {"model/plain": [2]}
    assert run_distributed(save_shards, 4, str(tmp_path)) == [
        {"model/5@0": [2, 3], "model/2@0": [1, 3], "model/1@0": [1, 3], "model/0@0": [0, 3], **plain},
        {"model/5@2": [2, 3], "model/2@1": [1, 3]},
        {"model/5@4": [1, 3]},
        {},
    ]
    path = tmp_path / "step-000006"
    state = load_state(path, Manifest.read(path))["model"]
    for rows in ROWS:
        assert torch.equal(state[str(rows)], torch.arange(rows * 3.0).view(rows, 3))
    assert torch.equal(state["tied"], state["5"])
    assert torch.equal(state["plain"], torch.ones(2))


def save_spread(world, path: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    spread = distribute_tensor(torch.ones(4, 1), init_device_mesh("cpu", (world.world_size,)), [Replicate()])
    target = Saver(CheckpointFolder(Path(path)), world, keep_last=2, keep_best=0, sign=1)
    with pytest.raises(CheckpointError) as caught:
        target.save({"optimizer": {"row": spread}}, Manifest(NEW, None, {}, ()))
    return str(caught.value)


def test_a_tensor_that_is_spread_otherwise_is_an_error_when_it_is_saved(tmp_path):
    for error in run_distributed(save_spread, 2, str(tmp_path)):
        assert "optimizer/row cannot be saved: it is spread over processes as (Replicate(),)" in error


def save_while_one_fails(world, path: str, failing: int) -> str:
    target = Saver(CheckpointFolder(Path(path)), world, keep_last=2, keep_best=0, sign=1)
    save(target, LAST)
    world.all_gather_tree(None)
    with pytest.MonkeyPatch.context() as patch:  # undone at the end: what is returned is a file, too
        if world.rank == failing:
            Faults(patch, 1, fill, stays=True)
        target.save(state_of(NEW), Manifest(NEW, None, {}, ()))
        try:
            is_written = target.finish(10)
        except StorageError as error:
            return str(error)
    return "written" if is_written else "still waiting"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_is_an_error_on_every_rank(tmp_path, failing):
    answers = run_distributed(save_while_one_fails, 2, str(tmp_path), failing)
    assert find(tmp_path) == LAST
    assert "No space left" in answers[failing]
    assert all("Earlier checkpoints are as they were" in answer for answer in answers), answers


def save_others(world, path: str) -> str:
    target = Saver(CheckpointFolder(Path(path)), world, keep_last=1, keep_best=0, sign=1)
    save(target, LAST)
    own = {"buffers": {"counts": torch.ones(2)} if world.rank else {}}
    target.save({**state_of(NEW), **own}, Manifest(NEW, None, {}, ()))
    with pytest.raises(StorageError) as caught:
        target.finish()
    return str(caught.value)


def test_ranks_that_hold_other_tensors_publish_nothing(tmp_path):
    """Which tensors a rank writes follows from all of them, so some would be in no file, or in two."""
    for error in run_distributed(save_others, 2, str(tmp_path)):
        assert "the processes hold other tensors, of which each writes some" in error
    assert find(tmp_path) == LAST


def save_beside_another(world, path: str) -> bool:
    """Rank 0 finishes its save before rank 1 has written its part of it."""
    first, second = (
        Saver(CheckpointFolder(Path(path, name)), world, keep_last=1, keep_best=0, sign=1)
        for name in ("first", "second")
    )
    save(first, LAST)
    world.all_gather_tree(None)
    if world.rank == 1:
        time.sleep(0.3)
    second.save(state_of(NEW), Manifest(NEW, None, {}, ()))
    return second.finish(10)


def test_what_ranks_told_another_saver_of_the_world_is_not_taken_for_an_answer(tmp_path):
    """The checksum of an earlier part was, once in twenty runs, and a good checkpoint was called damaged."""
    assert run_distributed(save_beside_another, 2, str(tmp_path)) == [True, True]


class Intruder:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


@pytest.fixture
def checkpoint(tmp_path):
    world = LocalWorld(torch.device("cpu"))
    folder = CheckpointFolder(tmp_path / "checkpoints")
    saver = Saver(folder, world, keep_last=1, keep_best=0, sign=1)
    saver.save({"model": {"weight": torch.ones(3)}}, Manifest(1, None, {}, ()))
    assert saver.finish()
    return folder


def write_bytes_of_intruder(path: Path, mark: Path, *, is_zip: bool) -> None:
    if is_zip:
        torch.save(Intruder(mark), path)
    else:
        path.write_bytes(pickle.dumps(Intruder(mark)))


@pytest.mark.parametrize("is_zip", [False, True], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["part-00000.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("is_signed", [False, True], ids=["damaged", "with the right checksum"])
def test_a_planted_pickle_never_runs(tmp_path, checkpoint, name, is_zip, is_signed):
    mark = tmp_path / "intruded"
    folder = checkpoint.of_step(1)
    manifest = Manifest.read(folder)
    write_bytes_of_intruder(folder / name, mark, is_zip=is_zip)
    if is_signed and name != "manifest.json":
        forged = write_durably(tmp_path / name, (folder / name).read_bytes())
        files = tuple(forged if entry.name == name else entry for entry in manifest.files)
        Manifest(1, None, {}, files).write(folder)
        found = checkpoint.newest_good(pytest.fail)
        assert found is not None
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_state(*found)
    else:
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
            checkpoint.newest_good(lambda _: None)
        if name != "manifest.json":
            with pytest.raises(CheckpointError, match="cannot be read"):
                load_state(folder, manifest)
    assert not mark.exists()
    content = (folder / name).read_bytes()
    torch.load(io.BytesIO(content), weights_only=False) if is_zip else pickle.loads(content)
    assert mark.exists()  # so it was a real one


def test_a_tensor_that_has_another_digest_is_refused_whoever_reads_it(tmp_path):
    """Its file is as it was written: no checksum tells."""
    target = make_saver(tmp_path)
    target.save(state_of(OLD), Manifest(OLD, None, {}, (), {"model/weight": "0" * 16}))
    target.finish()
    path, manifest = CheckpointFolder(tmp_path).newest_good(lambda _: None)
    with pytest.raises(CheckpointError, match="step-000002 is damaged: model/weight has the digest"):
        load_state(path, manifest)
    assert load_state(path, manifest, "meta")["model"]["weight"].is_meta  # which has no values to compare
