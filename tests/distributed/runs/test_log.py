"""Lines of metrics: the same on any number of processes, also after a resume between two of them."""

import dataclasses
import json
import math
import shutil
import time
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

from lanewise.config import CheckpointConfig, DistributedConfig, EveryConfig, LogConfig, RunConfig
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.runs.loggers.jsonl import JsonlLogger
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, TinyTransformer, configure
from tests.slow import slow

SLOW = pytest.mark.slow
"""Of products of which `make test` shows pairs."""
MEASURED = ("perf/", "time", "memory/")


def logged(every_steps: int, *, reducer: str = "ddp", clips: bool = False, **changes: Any) -> RunConfig:
    """23 steps of ragged sentences, seven an epoch, the last of which has three of four lanes."""
    config = configure(Language, num_lanes=4, steps=23, log_every_steps=every_steps, **changes)
    train = dataclasses.replace(config.train, max_grad_norm=0.5 if clips else None)
    distributed = DistributedConfig(equality="exact", reducer=reducer)
    checkpoint = CheckpointConfig(every=EveryConfig(steps=4), keep_last=100)
    return dataclasses.replace(config, train=train, distributed=distributed, checkpoint=checkpoint)


def fit(world, config, folder) -> int:
    """Train, or go on, and save every four steps; return the first step."""
    set_determinism("exact", 1)
    run_dir = RunDir(Path(folder))
    run = build_run(config, world)
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, ())
    saving = Saving(run, checkpoints)
    loggers = [JsonlLogger(run_dir.metrics, first_step)] if world.rank == 0 else []
    Engine(run, first_step=first_step, saving=saving).fit(run_dir, loggers)
    world.all_gather_tree(None)
    return first_step


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What a run wrote, but for what is measured."""
    lines = map(json.loads, RunDir(folder).metrics.read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]


def phases_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank spent its time on."""
    file = RunDir(folder).phases / f"rank-{rank:05d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody stopped, on one process, with a line every five steps."""
    folder = tmp_path_factory.mktemp("whole")
    run_distributed(fit, 1, logged(5), str(folder))
    assert [line["step"] for line in lines_of(folder)] == [1, 5, 10, 15, 20, 23]
    return folder


@pytest.mark.parametrize(
    ("saved", "world_size", "reducer"), [(8, 2, "ddp"), (16, 1, "ddp"), *slow((12, 3, "ddp"), (8, 2, "fsdp"))]
)
def test_a_run_that_was_killed_between_two_lines_goes_on_with_the_same_lines(
    tmp_path, whole, saved, world_size, reducer
):
    """It was killed long after its last checkpoint, so it has written lines that it writes again."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for checkpoint in RunDir(folder).checkpoints.iterdir():
        if int(checkpoint.name[5:]) > saved:
            shutil.rmtree(checkpoint)
    first_steps = run_distributed(fit, world_size, logged(5, reducer=reducer), str(folder))
    assert first_steps == [saved] * world_size
    assert lines_of(folder) == lines_of(whole)
    logged_steps = [line["step"] for line in lines_of(whole)]
    for rank in range(world_size):
        steps = [line["step"] for line in phases_of(folder, rank)]
        assert steps == [step for step in logged_steps if rank == 0 or step > saved]


def test_a_line_is_of_all_steps_since_the_one_before(tmp_path, whole):
    run_distributed(fit, 1, logged(1), str(tmp_path))
    steps = lines_of(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, 24))
    start = 0
    for line in lines_of(whole):
        interval = steps[start : line["step"]]
        start = line["step"]
        weight = sum(step["train/weight"] for step in interval)
        loss_sum = sum(step["train/loss"] * step["train/weight"] for step in interval)
        expected = {"train/loss": loss_sum / weight, "train/weight": weight / len(interval)}
        largest = max((step.pop("largest_loss") for step in interval), key=itemgetter("loss"))
        assert line.pop("largest_loss") == largest
        assert line == pytest.approx({**interval[-1], **expected}, rel=1e-14)  # the rest is of the last step


SLEPT_SECONDS = 0.1


class SlowOnOneRank(Language):
    """Computes longer on rank 1."""

    def forward(self, model, batch):
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(SLEPT_SECONDS)
        return super().forward(model, batch)


@pytest.mark.parametrize("every_steps", [*slow(1), 4])
def test_a_line_tells_who_computes_slowest_and_each_rank_what_it_spent_its_time_on(tmp_path, every_steps):
    config = configure(SlowOnOneRank, num_lanes=6, steps=9, log_every_steps=every_steps)
    computed = {}
    run_distributed(fit, 3, config, str(tmp_path))
    first, *lines = map(json.loads, RunDir(tmp_path).metrics.read_text().splitlines())
    assert "perf/slowest_rank" not in first  # nobody has computed a step before
    # Most of the time: another process of this machine may hold one up for a moment.
    assert median(line["perf/slowest_rank"] == 1 for line in lines) == 1
    for line in lines:
        assert line["perf/slowest_rank_seconds"] > SLEPT_SECONDS
        assert 0 < line["perf/median_rank_seconds"] < line["perf/slowest_rank_seconds"]
    for rank in range(3):
        phases = phases_of(tmp_path, rank)
        assert [line["step"] for line in phases] == [line["step"] for line in [first, *lines]]
        computed[rank] = median(line["time/forward_seconds"] for line in phases[1:])
        for line in phases[1:]:
            assert line["time/forward_seconds"] > SLEPT_SECONDS or rank != 1
            assert line["perf/step_p50_seconds"] > SLEPT_SECONDS
            assert line["memory/peak_gib"] > 0
    assert max(computed, key=computed.get) == 1
    for line, own in zip([first, *lines], phases_of(tmp_path, 0), strict=True):
        del own["time"], own["memory/peak_gib"]  # of different moments
        assert line.items() >= own.items()


def norms(world, config) -> tuple[list[int], dict[int, float]]:
    """Train; return the indices of the steps in which the norm was computed, and what the lines say."""
    set_determinism("exact", 1)
    engine = build_engine(config, world)
    compute, calls = engine.reducer.gradient_norms, []

    def count() -> Any:
        calls.append(None)
        return compute()

    engine.reducer.gradient_norms = count
    computed, written = [], {}
    for report in engine.steps():
        computed += [report.step] * len(calls)
        calls.clear()
        if report.interval is not None:
            written[report.step] = float(report.interval.grad_norm())
    return computed, written


@pytest.fixture(scope="module")
def every_norm():
    computed, written = run_distributed(norms, 1, logged(1))[0]
    assert computed == list(written) == list(range(23))
    return written


@pytest.mark.parametrize(("reducer", "world_size"), [("ddp", 2), ("fsdp", 2), *slow(("ddp", 1))])
def test_the_norm_is_computed_for_a_line_only(every_norm, reducer, world_size):
    for computed, written in run_distributed(norms, world_size, logged(10, reducer=reducer)):
        assert computed == [0, 9, 19, 22]
        assert written == {step: every_norm[step] for step in computed}


CLIPS, SCALES = {"clips": True}, {"precision": "fp16"}


@pytest.mark.parametrize(
    ("reducer", "needs"),
    [
        ("ddp", SCALES),
        *slow(("ddp", CLIPS), ("fsdp", CLIPS), ("fsdp", SCALES)),
    ],
)
def test_clipping_and_a_loss_scale_need_the_norm_of_every_step(reducer, needs):
    expected = run_distributed(norms, 1, logged(1, **needs))[0][1]
    for computed, written in run_distributed(norms, 2, logged(10, reducer=reducer, **needs)):
        assert computed == list(range(23))
        assert written == {step: expected[step] for step in (0, 9, 19, 22)}


def gradient_norms(world, config) -> tuple[list[int], list[dict[str, float]], list[dict[str, float]]]:
    """Train; return the indices of the steps that computed these, and what lines say of them and of all."""
    set_determinism("exact", 1)
    engine = build_engine(config, world)
    finish, gradients = engine.step.pass_.finish, []

    def note(turn: Any, **needs: bool) -> Any:
        gradients.append(finish(turn, **needs))
        return gradients[-1]

    engine.step.pass_.finish = note
    computed, each, together = [], [], []
    for report in engine.steps():
        if gradients.pop().norms is not None:
            computed.append(report.step)
        if report.interval is not None:
            metrics = report.interval.columns(1, world.device)
            each.append({key: one for key, one in metrics.items() if key.startswith("gradients/")})
            together.append(metrics["train/grad_norm"])
    return computed, each, together


def logging_gradients(**changes: Any) -> RunConfig:
    config = logged(10, **changes)
    return dataclasses.replace(config, log=LogConfig(every_steps=10, gradients=True))


@pytest.fixture(scope="module")
def norms_of_parameters():
    return run_distributed(gradient_norms, 1, logging_gradients())[0]


def test_lines_have_the_norm_of_each_parameter_before_clipping(norms_of_parameters):
    computed, each, together = norms_of_parameters
    assert computed == [0, 9, 19, 22]
    clipped = run_distributed(gradient_norms, 1, logging_gradients(clips=True))[0]
    assert clipped[1][0] == each[0]
    names = [f"gradients/{name}" for name, _ in TinyTransformer().named_parameters()]
    for line, norm in zip(each, together, strict=True):
        assert list(line) == names
        assert math.hypot(*line.values()) == pytest.approx(norm)
        assert line["gradients/never"] == 0.0


@pytest.mark.parametrize(
    ("reducer", "world_size"),
    [
        ("ddp", 3),
        *slow(("ddp", 2), ("fsdp", 2), ("fsdp", 3)),
        ("data_parallel", 1),
        ("balanced_data_parallel", 1),
    ],
)
def test_they_are_the_same_on_any_devices(norms_of_parameters, reducer, world_size):
    config = logging_gradients(reducer=reducer)
    if world_size == 1:
        devices = dataclasses.replace(config.distributed, devices=("cpu", "cpu", "cpu"))
        config = dataclasses.replace(config, distributed=devices)
    for result in run_distributed(gradient_norms, world_size, config):
        assert result == norms_of_parameters


@pytest.mark.parametrize("reducer", ["ddp", *slow("fsdp")])
def test_in_close_they_are_close(norms_of_parameters, reducer):
    config = logging_gradients(reducer=reducer)
    config = dataclasses.replace(config, distributed=DistributedConfig(equality="close", reducer=reducer))
    (computed, each, _), again = run_distributed(gradient_norms, 2, config)
    assert (computed, each) == again[:2] == (norms_of_parameters[0], again[1])
    assert each[0] == pytest.approx(norms_of_parameters[1][0], rel=1e-4)


@pytest.mark.parametrize("reducer", ["ddp", *slow("fsdp")])
def test_without_being_asked_for_no_line_has_them_and_only_the_norm_of_a_line_computes_them(reducer):
    for computed, each, _ in run_distributed(gradient_norms, 2, logged(10, reducer=reducer)):
        assert (computed, each) == ([0, 9, 19, 22], [{}] * 4)


def test_they_are_columns_of_the_metrics(tmp_path):
    run_distributed(fit, 2, logging_gradients(reducer="fsdp"), str(tmp_path))
    for line in lines_of(tmp_path):
        assert line["gradients/embedding.weight"] > 0
