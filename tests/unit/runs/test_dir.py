"""A run's folder has one writer, and one run in its life."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lanewise.errors import RunDirError, StorageError
from lanewise.runs.dir import RunDir

CLAIM = """
import sys
from pathlib import Path
from lanewise.errors import RunDirError
from lanewise.runs.dir import RunDir

try:
    lock = RunDir(Path(sys.argv[1])).claim()
except RunDirError as error:
    print(error)
else:
    print("claimed", flush=True)
    sys.stdin.readline()
"""


def start_claim(path: Path) -> subprocess.Popen[str]:
    """Claim in a new process that keeps what it got until its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_what_is_in_the_folder():
    run_dir = RunDir(Path("runs/mnist"))
    assert str(run_dir.config) == "runs/mnist/config.yaml"
    assert str(run_dir.record) == "runs/mnist/run.jsonl"
    assert str(run_dir.metrics) == "runs/mnist/metrics.jsonl"
    assert str(run_dir.phases) == "runs/mnist/phases"
    assert str(run_dir.model) == "runs/mnist/model.safetensors"
    assert str(run_dir.log(0)) == "runs/mnist/logs/rank-00000.log"
    assert str(run_dir.log(12345)) == "runs/mnist/logs/rank-12345.log"


def test_claiming_makes_the_folder_and_its_parents(tmp_path):
    with RunDir(tmp_path / "a" / "b").claim():
        assert (tmp_path / "a" / "b").is_dir()


def test_claiming_twice_is_an_error(tmp_path):
    with RunDir(tmp_path).claim(), pytest.raises(RunDirError) as caught:
        RunDir(tmp_path).claim()
    assert str(caught.value) == (
        f"run_dir {tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}. "
        "Choose another train.run_dir, or wait for that one to end."
    )


def test_another_process_cannot_claim_what_is_in_use(tmp_path):
    with RunDir(tmp_path).claim(), start_claim(tmp_path) as other:
        said, _ = other.communicate()
    assert said.startswith(f"run_dir {tmp_path} is in use by process {os.getpid()} on ")


def test_it_is_free_again_once_its_claim_is_closed(tmp_path):
    RunDir(tmp_path).claim().close()
    RunDir(tmp_path).claim().close()


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO], ids=errno.errorcode.get)
def no_locks(request, monkeypatch):
    """A file system without locks; some say so in another way than others."""

    def flock(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_where_no_lock_can_be_had_a_file_keeps_others_out(tmp_path, no_locks, caplog):
    owner = tmp_path / ".owner"
    with RunDir(tmp_path).claim():
        assert owner.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(RunDirError) as caught:
            RunDir(tmp_path).claim()
        assert owner.exists()
    assert f"if the process that {owner} names has ended, remove that file." in str(caught.value)
    assert not owner.exists()
    (record,) = caplog.records
    assert f"{owner} keeps other runs out" in record.getMessage()
    RunDir(tmp_path).claim().close()


def test_where_no_lock_can_be_had_a_refused_claim_leaves_nothing(tmp_path, no_locks):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunDirError, match="holds a run already"):
        RunDir(tmp_path).claim()
    RunDir(tmp_path).claim(may_hold_run=True).close()


def test_a_later_start_waits_for_the_lock_of_a_lost_host(tmp_path):
    """A file server keeps it for a while: the start ended with exit code 2, and so the run."""
    with start_claim(tmp_path) as other:
        assert other.stdout.readline() == "claimed\n"
        ending = threading.Timer(0.5, other.kill)
        ending.start()
        RunDir(tmp_path).claim(may_hold_run=True, launch="one", lost_seconds=9.0).close()
        ending.join()


@pytest.mark.parametrize(("launch", "lost_seconds"), [("one", 0.1), ("one", 0.0), ("two", 0.1), ("", 0.1)])
def test_only_a_later_start_of_the_same_launch_takes_over_a_folder_without_locks(
    tmp_path, monkeypatch, launch, lost_seconds
):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    lost = RunDir(tmp_path).claim(launch="one")
    if (launch, lost_seconds) != ("one", 0.1):
        with lost, pytest.raises(RunDirError, match="in use by another process"):
            RunDir(tmp_path).claim(launch=launch, lost_seconds=lost_seconds)
        return
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with RunDir(tmp_path).claim(launch=launch, lost_seconds=lost_seconds):
        lost.close()  # a late end of the lost host
        assert "on another of launch one" in (tmp_path / ".owner").read_text()
    assert not (tmp_path / ".owner").exists()


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_it_is_free_again_once_the_process(tmp_path, how):
    with start_claim(tmp_path) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(RunDirError, match="in use"):
            RunDir(tmp_path).claim()
        if how == "is killed":
            other.send_signal(signal.SIGKILL)
    RunDir(tmp_path).claim().close()


def test_a_program_that_the_run_started_does_not_keep_the_claim(tmp_path):
    with RunDir(tmp_path).claim():
        program = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        RunDir(tmp_path).claim().close()
    finally:
        program.kill()
        program.wait()


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("precious")
    with pytest.raises(RunDirError) as caught:
        RunDir(tmp_path).claim()
    assert str(caught.value) == (
        f"run_dir {tmp_path} holds a run already (it has metrics.jsonl). Go on with it (--resume, "
        "from Python resume=True), replace it (--overwrite, overwrite=True), or choose another "
        "train.run_dir, such as one with {time} or {number} in its name."
    )
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", ".lock"}
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"


def test_a_run_is_replaced_where_that_was_asked_for_and_other_files_stay(tmp_path):
    run_dir = RunDir(tmp_path)
    for path in (run_dir.metrics, run_dir.record, run_dir.config, run_dir.model, tmp_path / "notes.txt"):
        path.write_text("old")
    (run_dir.checkpoints / "step-000004").mkdir(parents=True)
    (run_dir.checkpoints / "step-000004" / "manifest.json").write_text("old")
    run_dir.claim(overwrites=True).close()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", ".lock"}


@pytest.mark.parametrize("overwrites", [False, True])
def test_another_run_takes_no_record_of_one_that_ended_in_its_first_step(tmp_path, overwrites):
    """Trackers would join the two."""
    run_dir = RunDir(tmp_path)
    run_dir.record.write_text("old")
    run_dir.claim(may_hold_run=True).close()
    assert run_dir.record.exists()
    run_dir.claim(overwrites=overwrites).close()
    assert not run_dir.record.exists()


@pytest.mark.parametrize("what", ["a link to {}/elsewhere", "no folder"])
def test_a_run_is_replaced_as_a_whole_or_not_at_all(tmp_path, what):
    (tmp_path / "elsewhere" / "step-000004").mkdir(parents=True)
    run_dir = RunDir(tmp_path / "run")
    run_dir.phases.mkdir(parents=True)
    for path in (run_dir.metrics, run_dir.record, run_dir.config, run_dir.model):
        path.write_text("old")
    if what == "no folder":
        run_dir.profile.write_text("old")
    else:
        run_dir.checkpoints.symlink_to(tmp_path / "elsewhere")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(RunDirError, match=f"{what.format(tmp_path)}.* Nothing was removed"):
        run_dir.claim(overwrites=True)
    assert set(tmp_path.rglob("*")) - before == {run_dir.path / ".lock"}


def test_a_file_that_only_looks_like_one_of_a_run_is_not_removed(tmp_path):
    """A project's own config.yaml in the folder that becomes run_dir."""
    (tmp_path / "config.yaml").write_text("mine")
    RunDir(tmp_path).claim(overwrites=True).close()
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_other_files_may_be_there(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    RunDir(tmp_path).claim().close()
    assert (tmp_path / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "File exists"),
        ("file/run", "Not a directory"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made(tmp_path, name, reason):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError) as caught:
        RunDir(tmp_path / name).claim()
    assert str(caught.value) == f"run_dir {tmp_path / name} cannot be written: {reason}."


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_without_the_right_to_write(tmp_path, mode):
    tmp_path.chmod(mode)
    try:
        with pytest.raises(RunDirError, match="cannot be written: Permission denied"):
            RunDir(tmp_path / "run").claim()
    finally:
        tmp_path.chmod(0o700)


def test_a_run_that_came_and_went_just_before_the_lock_is_left_alone(tmp_path, monkeypatch):
    flock = fcntl.flock

    def flock_late(*args):
        (tmp_path / "metrics.jsonl").write_text("precious")
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with pytest.raises(RunDirError, match="holds a run already"), RunDir(tmp_path).claim():
        pass


TRACES = [
    "metrics.jsonl",
    "model.safetensors",
    "averaged.safetensors",
    "best.safetensors",
    "checkpoints/step-000002/x",
]
TRACES += ["tensorboard/events", "audit/plan.jsonl"]


@pytest.mark.parametrize("trace", TRACES)
def test_whatever_a_step_leaves_is_of_a_run(tmp_path, trace):
    """A new run beside the checkpoints of an old one would later go on from the old one's."""
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).touch()
    with pytest.raises(RunDirError, match=f"holds a run already .it has {trace.partition('/')[0]}"):
        RunDir(tmp_path).claim()
    RunDir(tmp_path).claim(may_hold_run=True).close()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "audit"])
@pytest.mark.parametrize("kind", ["file", "loop"])
def test_what_should_be_a_folder_and_is_none_is_said_before_the_run(tmp_path, name, kind):
    (tmp_path / name).touch() if kind == "file" else (tmp_path / name).symlink_to(name)
    with pytest.raises(StorageError, match=f"{name} cannot be written: "):
        RunDir(tmp_path).claim()
    (tmp_path / name).unlink()
    RunDir(tmp_path).claim().close()


def test_a_run_that_failed_before_its_first_step_may_be_started_again(tmp_path):
    for name in ("config.yaml", "run.jsonl", "logs/rank-00000.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    RunDir(tmp_path).claim().close()


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    for name in (
        ".model.safetensors.tmp",
        ".best.safetensors.tmp",
        ".averaged.safetensors.tmp",
        ".config.yaml.tmp",
    ):
        (tmp_path / name).write_text("half")
    RunDir(tmp_path).claim().close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(RunDirError, match=r"cannot be written: it is a link"):
        RunDir(tmp_path).claim()
    assert not (tmp_path / "precious").exists()
