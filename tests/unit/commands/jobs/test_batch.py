"""The process that runs a job inside of its batch job."""

import json

import pytest

from lanewise.commands.jobs import batch
from lanewise.commands.jobs.outcome import Outcome
from lanewise.commands.jobs.train import TrainJob
from lanewise.errors import ConfigError, LaunchError, PreemptedError
from lanewise.runs.dir import RunDir
from tests.distributed.tasks import Smooth, configure


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A run in this folder."""
    config = configure(Smooth)
    monkeypatch.setattr(TrainJob, "run_dir", RunDir(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(batch, "wants_stop", lambda: False)  # whatever signals other tests took
    return TrainJob(config)


def stops_before(folder, *steps: int) -> None:
    """Write the record of a run that was told to stop before these steps."""
    lines = []
    for step in steps:
        of_start = {"run_id": "a", "id": f"{len(lines)}"}
        lines.append({"event": "start", "first_step": 1, **of_start})
        lines.append({"event": "end", "reason": "preempted", "last_step": step, **of_start})
    (folder / "run.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(("steps", "is_requeued"), [((6,), True), ((3, 6), True), ((6, 6), False)])
def test_a_stopped_run_is_requeued_only_if_it_gets_on(tmp_path, monkeypatch, job, steps, is_requeued):
    commands = []
    monkeypatch.setattr(batch, "run_slurm", lambda *command: commands.append(command))
    stops_before(tmp_path, *steps)
    batch._requeue(job)
    assert commands == [("scontrol", "requeue", "17")] * is_requeued


def test_where_slurm_ends_the_job_slurm_decides(tmp_path, monkeypatch, job):
    monkeypatch.setattr(batch, "run_slurm", lambda *_: pytest.fail("it was requeued"))
    monkeypatch.setattr(batch, "wants_stop", lambda: True)
    stops_before(tmp_path, 6)
    batch._requeue(job)


def test_a_job_that_others_can_write_is_not_run(tmp_path):
    file = tmp_path / "1.job"
    file.touch(0o600)
    assert batch._read_own(file) == b""
    file.chmod(0o620)
    with pytest.raises(LaunchError, match="may have been written by another user"):
        batch._read_own(file)


def test_who_waits_gets_the_result_or_what_was_in_its_way(tmp_path):
    outcome, log = Outcome(tmp_path / "1.job"), tmp_path / "17.log"
    with pytest.raises(LaunchError, match=r"ended with exit code 9 before it was done: see .*17\.log"):
        outcome.read(9, log)
    outcome.fail(ConfigError("it is wrong."))
    with pytest.raises(LaunchError, match=r"it is wrong\.") as error:
        outcome.read(2, log)
    assert error.value.exit_code == 2
    outcome.begin()
    outcome.succeed(PreemptedError("stopped"))
    with pytest.raises(PreemptedError, match="stopped"):
        outcome.read(75, log)
    outcome.succeed({"digits/accuracy": 0.5})
    assert outcome.read(0, log) == {"digits/accuracy": 0.5}
