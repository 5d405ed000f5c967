"""Profiled steps: a trace and a table for each rank, and nothing else changes."""

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lanewise.engine import profiler
from tests.integration.command import train, write_config


def steps_of(run_dir) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("devices", [1, 2])
def test_each_rank_leaves_a_trace_and_a_table_and_the_model_is_the_same(tmp_path, devices):
    config = write_config(tmp_path)
    options = ("--distributed.devices", devices, "--train.run_dir")
    train(config, *options, tmp_path / "plain").require_success()
    done = train(config, *options, tmp_path / "run", "--train.profile_steps", "[1, 2]").require_success()
    assert "steps 1 to 2 were profiled: " in done.stderr
    plain, profiled = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "run"))
    assert plain == profiled
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "plain")
    files = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert files == [f"rank-{rank:05d}.{end}" for rank in range(devices) for end in ("json.gz", "txt")]
    for rank in range(devices):
        with gzip.open(tmp_path / "run" / "profile" / f"rank-{rank:05d}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        # The lanes of two steps, in each of which, as the first of the run, one runs twice more.
        assert names.count("aten::mse_loss") == 2 * (4 // devices + 2)
        table = (tmp_path / "run" / "profile" / f"rank-{rank:05d}.txt").read_text()
        assert "aten::mse_loss" in table


@pytest.mark.parametrize(
    ("steps", "is_written"), [("[1, 1]", True), ("[6, 6]", True), ("[5, 90]", True), ("[90, 95]", False)]
)
def test_steps_at_the_ends_of_a_run_are_profiled_as_far_as_there_are_any(tmp_path, steps, is_written):
    config = write_config(tmp_path)
    done = train(config, "--train.profile_steps", steps).require_success()
    assert ("nothing was profiled: the run ended before step 90" in done.stderr) is not is_written
    assert ("steps 5 to 6 were profiled" in done.stderr) is (steps == "[5, 90]")
    assert steps_of(tmp_path / "run") == list(range(1, 7))
    assert (tmp_path / "run" / "profile").exists() is is_written


@pytest.mark.parametrize("steps", ["[3, 2]", "[1]", "[0, 1]"])
def test_what_is_no_range_is_refused(tmp_path, steps):
    done = train(write_config(tmp_path), "--train.profile_steps", steps)
    assert done.code == 2
    assert "train.profile_steps" in done.stderr
    assert not (tmp_path / "run").exists()


def test_on_a_gpu_its_kernels_are_recorded_too(monkeypatch, tmp_path):
    """The enumeration of torch 2.11 has no subscripts, which ended a run on the first GPU that it met."""
    asked = []

    def recording(activities):
        asked.extend(activities)
        return profile(activities=[ProfilerActivity.CPU])

    monkeypatch.setattr(profiler, "profile", recording)
    on_a_gpu = profiler.StepProfiler((1, 1), tmp_path, 0, torch.device("cuda"))
    assert list(on_a_gpu.follow(iter([]), 0)) == []
    assert asked == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
