"""The audit of a run on a stream that was killed after a checkpoint, and went on with other processes."""

import json
import shutil
from dataclasses import replace

import pytest

from lanewise.commands.jobs.train import TrainJob
from lanewise.commands.verify.audit import Audit
from lanewise.config import EveryConfig, RunConfig
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.commands.test_stream_verify import Lanes, Plain, config
from tests.slow import slow


def train(world: World, run: RunConfig, is_resumed: bool) -> None:
    set_determinism("exact", threads=1)
    TrainJob(run, is_audited=not is_resumed, is_resumed=is_resumed).run(world)


@pytest.mark.parametrize(("stream", "shuffle_buffer"), [(Lanes, 4), *slow((Plain, 0))])
def test_a_run_that_was_killed_and_went_on_gave_each_sample_once(tmp_path, stream, shuffle_buffer):
    run = config(stream, shuffle_buffer=shuffle_buffer)
    run = replace(run, checkpoint=replace(run.checkpoint, every=EveryConfig(steps=2)))
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    whole = replace(run.train, run_dir=str(run_dir.path))
    run_distributed(train, 2, replace(run, train=replace(whole, max_steps=5)), False)
    shutil.rmtree(run_dir.checkpoints / "step-000005")
    run_distributed(train, 3, replace(run, train=whole), True)
    audit = Audit(run_dir.audit)
    report = audit.check()
    assert (report.problems, report.notes) == ([], [])
    assert (report.num_epochs, report.num_samples) == (2, 2 * 21)
    plans = [json.loads(line) for line in (run_dir.audit / "plan.jsonl").read_text().splitlines()]
    assert [plan["step"] for plan in plans] == [1, 5]
