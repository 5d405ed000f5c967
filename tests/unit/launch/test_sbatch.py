"""What is submitted to Slurm, and what becomes of it; sbatch is a script here."""

import os
from pathlib import Path

import pytest

from lanewise.config.launchers import SlurmConfig
from lanewise.errors import ConfigError, LaunchError
from lanewise.launch.sbatch import BatchJob


def batch_job(folder: Path, **slurm: object) -> BatchJob:
    """A job for two nodes with four processes each."""
    return BatchJob(
        file=folder / "run" / "slurm" / "1.job",
        cwd=folder,
        num_nodes=2,
        num_processes=4,
        num_cores=8,
        seconds_to_save=30,
        slurm=SlurmConfig(**slurm),
    )


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Puts an sbatch on the path, which does what the commands of a shell say."""

    def write(commands: str) -> None:
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / "sbatch").chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return write


def test_the_script_asks_for_what_the_run_needs_and_last_for_what_the_user_says(tmp_path):
    given = {"time": "4:00:00", "partition": "gpu", "flags": ("--account=my lab", "--cpus-per-task=2")}
    head, *options, program, end = batch_job(tmp_path, **given).write().split("\n")
    assert (head, end) == ("#!/bin/sh", "")
    assert options == [
        "#SBATCH --job-name=lanewise",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=4:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --signal=TERM@90",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --chdir={tmp_path}",
        f"#SBATCH --output={tmp_path}/run/slurm/%j.log",
        "#SBATCH '--account=my lab'",
        "#SBATCH --cpus-per-task=2",
    ]
    assert program.startswith("exec ")
    assert program.endswith(f" -P -m lanewise.commands.jobs.batch {tmp_path}/run/slurm/1.job")


def test_a_percent_sign_in_a_path_is_none_of_slurms(tmp_path):
    assert f"--output={tmp_path}/50%%/run/slurm/%j.log" in batch_job(tmp_path / "50%").write()


@pytest.mark.parametrize("broken", ["1\n#SBATCH --partition=other", "1\rtouch stolen", "1\u2028"])
@pytest.mark.parametrize("key", ["time", "partition", "flags", "folder"])
def test_nothing_that_is_more_than_a_line_gets_into_the_script(tmp_path, key, broken):
    given = {"folder": {}, "flags": {"flags": (broken,)}}.get(key, {key: broken})
    # A relative folder: of a long one the message has the first characters alone.
    job = batch_job(Path(broken) if key == "folder" else tmp_path, **given)
    for write in (job.write, job.describe, lambda: job.write_file(b"")):
        with pytest.raises(ConfigError, match=r"an option of sbatch must be one line: got \".*1\\"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_reads_the_job(tmp_path, sbatch):
    sbatch("echo '17;cluster'")
    job = batch_job(tmp_path)
    job.write_file(b"secret")
    assert job.submit() == "17"
    assert job.file.stat().st_mode & 0o777 == 0o600
    assert job.script.read_text() == job.write()


def test_what_sbatch_refuses_is_told(tmp_path, sbatch):
    sbatch("echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    job = batch_job(tmp_path)
    job.write_file(b"")
    for submit in (job.submit, job.submit_and_wait):
        with pytest.raises(LaunchError, match="sbatch failed: sbatch: error: invalid partition"):
            submit()


def test_without_sbatch_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch is not installed on this machine"):
        batch_job(tmp_path).write_file(b"")
    assert not (tmp_path / "run").exists()


def test_who_waits_is_told_the_number_at_once_and_the_exit_code_in_the_end(tmp_path, sbatch, capfd):
    sbatch('echo 17; test "$2" = --wait && exit 3')
    job = batch_job(tmp_path)
    job.write_file(b"")
    assert job.submit_and_wait() == ("17", 3)
    assert "scancel 17" in capfd.readouterr().err
