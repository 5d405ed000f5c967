"""A step of a run, or one lane of it, is taken again later, on other devices, to the same bytes."""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.commands.jobs.train import TrainJob
from lanewise.commands.replay.lane import LaneJob
from lanewise.commands.replay.plan import plan_replay
from lanewise.commands.replay.replay import Replay, ReplayJob
from lanewise.commands.replay.report import compare_steps
from lanewise.config import (
    CheckpointConfig,
    DistributedConfig,
    EvaluateConfig,
    EveryConfig,
    IntegrityConfig,
    RunConfig,
    SchedulerConfig,
)
from lanewise.config.class_path import add_search_path
from lanewise.engine import observers
from lanewise.engine.run import build
from lanewise.errors import ConfigError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.watch.heartbeat import heartbeat
from lanewise.processes.world.digests import digests_of
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.data import test_parquet
from tests.distributed.digests import RUNS
from tests.distributed.tasks import Language, Sentences, configure
from tests.slow import slow

ROOT = Path(__file__).parents[3]
NUM_STEPS = 9


class Evaluated(Language):
    """Evaluates on sentences of its own, and counts how often."""

    num_evaluated = 0

    def eval_datasets(self) -> Mapping[str, Any]:
        return {"held_out": Sentences(11)}

    def eval_forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        Evaluated.num_evaluated += 1
        return model(batch)


def plateau() -> RunConfig:
    """Follows an evaluation after every second step, whose value seldom improves."""
    return replace(
        configure(Evaluated, lr=0.3, steps=NUM_STEPS),
        evaluate=EvaluateConfig(every_steps=2, best="held_out/loss"),
        scheduler=SchedulerConfig(
            class_path="torch.optim.lr_scheduler.ReduceLROnPlateau", init_args={"patience": 0}
        ),
    )


def kept_in(run_dir: Path, config: RunConfig, *, reducer: Any = "ddp", num_devices: int = 3) -> RunConfig:
    """Return a run that keeps checkpoints, and writes digests, there."""
    return replace(
        config,
        train=replace(config.train, run_dir=str(run_dir)),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=4), keep_last=9),
        integrity=IntegrityConfig(digest_every_steps=1),
        distributed=DistributedConfig(
            reducer=reducer, devices=num_devices, device_type="cpu", equality="exact"
        ),
        search_path=str(ROOT),
    )


def train(
    world: World,
    config: RunConfig,
    *,
    notes: bool = False,
    resumes: bool = False,
    allow: Sequence[str] = (),
    negates: int | None = None,
) -> dict[tuple[int, int, str], str]:
    """Train as the command does; where it notes them, return the digests of gradients as they enter the sum.

    By step, lane and parameter.
    """
    set_determinism("exact", 1)
    noted: dict[tuple[int, int, str], str] = {}

    def note(name: str, parameter: torch.Tensor) -> None:
        _, step, lane = heartbeat.note
        noted[step + 1, lane, name] = digests_of({"": parameter.grad})[""]

    def noting(task: Any, seed: int) -> nn.Module:
        model = plain(task, seed)
        for name, parameter in model.named_parameters():
            if notes and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(note, name))
        return model

    def negating(state: Mapping[str, Any], *given: Any) -> dict[str, str]:
        if given[-1] == negates:
            next(iter(state["model"].values())).neg_()
        return plain_digests(state, *given)

    Path(config.train.run_dir).mkdir(exist_ok=True)
    plain_digests, observers.gather_digests = observers.gather_digests, negating
    plain, build.build_model = build.build_model, noting
    TrainJob(config, None, (), resumes, tuple(allow)).run(world)
    return noted


def again(
    world: World, run_dir: Path, picks: Sequence[tuple[int, int]], step: int
) -> tuple[list[Mapping[str, Any]], dict[int, Mapping[str, Any]]]:
    """Run lanes again, each of a step, and the steps up to one; return also what differs from the run."""
    set_determinism("exact", 1)
    lanes = []
    for number, (of_step, lane) in enumerate(picks):
        plan = plan_replay(run_dir, of_step, trust=True)
        folder = run_dir.parent / f"lane-{world.world_size}-{number}"
        lanes.append(LaneJob(plan.config, plan=plan, folder=folder, lane=lane).run(world))
    plan = plan_replay(run_dir, step, trust=True)
    steps, folder = range(plan.num_taken + 1, step + 1), run_dir.parent / f"steps-{world.world_size}"
    job = ReplayJob(plan.config, plan=plan, folder=folder, observed=steps)
    compared = compare_steps(plan, *job.run(world))
    for of_step, one in compared.items():
        assert len(plan.written[of_step]["digests"]) < one.comparison.num_compared
    found = {of_step: one.comparison.differing for of_step, one in compared.items()}
    return lanes, {
        of_step: {name: values for part in parts.values() for name, values in part.unequal.items()}
        for of_step, parts in found.items()
        if parts
    }


OF_KINDS = {
    **{name: RUNS[name] for name in ("Language fp16", "TwoLosses fp16", "Contrastive fp16", "ByRows bf16")},
    **{name: RUNS[name] for name in RUNS if name.startswith(("stream ", "kind Statistics", "order 2"))},
    **{name: RUNS[name] for name in ("Unknown float32", "missing Gappy") if name in RUNS},
    "plateau": plateau(),
}


FEW = ("Language fp16", "Contrastive fp16")
"""A loss of each lane, and one of all: what `make test` replays, on two processes."""


@pytest.mark.parametrize(
    ("name", "counts"), [*((name, (2,)) for name in FEW), *slow(*((name, (1, 2)) for name in OF_KINDS))]
)
def test_random_steps_and_lanes_of_three_processes_are_the_same_bytes_on_others(tmp_path, name, counts):
    run_dir = tmp_path / "run"
    of_ranks = run_distributed(partial(train, notes=True), 3, kept_in(run_dir, OF_KINDS[name]))
    noted = {place: digest for of_rank in of_ranks for place, digest in of_rank.items()}
    draws = random.Random(name)
    picks = draws.sample(sorted({place[:2] for place in noted}), 3)
    last, before = max(place[0] for place in noted), written_in(run_dir)
    with RunDir(run_dir).claim(may_hold_run=True):  # as a run that goes on has it
        for num_processes in counts:
            lanes, differing = run_distributed(again, num_processes, run_dir, picks, last)[0]
            assert not differing
            for lane, pick in zip(lanes, picks, strict=True):
                there = {place[2]: digest for place, digest in noted.items() if place[:2] == pick}
                assert lane["digests"] == there
    assert written_in(run_dir) == before


def written_in(run_dir: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != ".lock"}


def trained(run_dir: Path, config: RunConfig, **given: Any) -> Path:
    """Train on one process."""
    run_distributed(partial(train, **given), 1, kept_in(run_dir, config, num_devices=1))
    return run_dir


def differing(run_dir: Path, step: int) -> set[int]:
    """Return the steps up to one, from its checkpoint, that differ from what the run wrote."""
    return set(run_distributed(again, 1, run_dir, (), step)[0][1])


def test_a_run_under_fsdp_is_replayed_on_one_process(tmp_path):
    run_distributed(train, 3, kept_in(tmp_path / "run", RUNS["Language bf16"], reducer="fsdp"))
    assert differing(tmp_path / "run", 8) == set()


@pytest.mark.parametrize("num_processes", [1, *slow(2)])
def test_rows_in_blocks_of_a_parquet_file(tmp_path, num_processes):
    (tmp_path / "rows").mkdir()
    test_parquet.write(tmp_path / "rows" / "0.parquet", 0, [13, 5, 21])
    config = configure(test_parquet.Bags, num_lanes=3, steps=7, folder=str(tmp_path / "rows"))
    run_distributed(train, 3, kept_in(tmp_path / "run", config))
    _, differing = run_distributed(again, num_processes, tmp_path / "run", (), 7)[0]
    assert not differing


class Poisoned(Language):
    """One sample has a weight that nobody meant."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        loss = super().loss(outputs, batch)
        is_poisoned = (batch[:, :2] == Sentences(17)[16][:2]).all(dim=1).any()
        return replace(loss, sum=loss.sum * (1e6 if is_poisoned else 1.0))


def test_a_poisoned_sample_is_named(tmp_path):
    """It is in some lane of every epoch: that of the largest loss."""
    config = configure(Poisoned, num_lanes=3, micro_batch_size=3, steps=2, num_samples=17)
    run_dir, picks = trained(tmp_path / "run", config), [(step, lane) for step in (1, 2) for lane in range(3)]
    lanes, _ = run_distributed(again, 1, run_dir, picks, 2)[0]
    worst = max(lanes, key=lambda lane: lane["loss"])
    assert 16 in worst["samples"]
    assert max(worst["alone"], key=lambda one: one[1])[0] == 16


def test_a_step_that_a_device_computed_wrongly_differs_from_there_on(tmp_path):
    """The checkpoint of step 8 has the error in it, so what follows is as the run wrote it."""
    run_dir = trained(tmp_path / "run", configure(Language, steps=NUM_STEPS), negates=6)
    assert differing(run_dir, 8) == {6, 7, 8}
    assert differing(run_dir, 9) == set()


@pytest.mark.parametrize("kept", [4, *slow(5, None)])
def test_steps_on_both_sides_of_a_resume_with_other_options(tmp_path, kept):
    """Whichever checkpoint is left: the one at the border, one before it, or none."""
    run_dir, config = tmp_path / "run", configure(Language, steps=5)
    trained(run_dir, config)
    other = replace(
        configure(Language, steps=NUM_STEPS, lr=1e-3), train=replace(config.train, max_steps=NUM_STEPS)
    )
    trained(run_dir, other, resumes=True, allow=["optimizer"])
    for folder in CheckpointFolder(RunDir(run_dir).checkpoints).all():
        if folder.name != f"step-{kept or 0:06d}":
            folder.rename(tmp_path / folder.name)
    assert differing(run_dir, 7) == set()
    assert differing(run_dir, 5) == set()


@pytest.mark.parametrize("has_lines", [True, False])
def test_a_value_that_a_scheduler_follows_is_read_where_the_run_wrote_it(tmp_path, has_lines):
    run_dir = trained(tmp_path / "run", plateau())
    if not has_lines:
        lines = RunDir(run_dir).metrics.read_text().splitlines(keepends=True)
        RunDir(run_dir).metrics.write_text("".join(line for line in lines if "held_out" not in line))
    num_evaluated, rates = run_distributed(rates_again, 1, run_dir)[0]
    assert (num_evaluated == 0) == has_lines
    assert len(rates) > 2
    assert differing(run_dir, 4) == differing(run_dir, 8) == set()


def rates_again(world: World, run_dir: Path) -> tuple[int, set[float]]:
    """Take all steps again from the seed; return how often a forward evaluated, and the learning rates."""
    set_determinism("exact", 1)
    rates = set()
    with closing(Replay(plan_replay(run_dir, 8, before=1, trust=True), world, run_dir)) as replay:
        while replay.num_taken < 8:
            rates.add(replay.columns(replay.take())["train/learning_rate"])
    return Evaluated.num_evaluated, rates


def test_a_false_value_of_an_evaluation_differs(tmp_path):
    """The replay evaluated nothing, and called the step as the run wrote it."""
    run_dir, lines = trained(tmp_path / "run", plateau()), []
    for line in map(json.loads, RunDir(run_dir).metrics.read_text().splitlines()):
        false = {"held_out/loss": 0.5} if line["step"] == 6 and "held_out/loss" in line else {}
        lines.append(json.dumps(line | false))
    RunDir(run_dir).metrics.write_text("\n".join(lines) + "\n")
    ((_, found),) = run_distributed(again, 1, run_dir, (), 8)
    assert [*found] == [6]
    assert found[6]["held_out/loss"][1] == 0.5


def lanes_of(world: World, run_dir: Path, step: int, lanes: Sequence[int]) -> list[Any]:
    """Run lanes of a step again; return what each found, or why it could not be."""
    set_determinism("exact", 1)
    plan, found = plan_replay(run_dir, step, trust=True), list[Any]()
    for lane in lanes:
        try:
            found.append(LaneJob(plan.config, plan=plan, folder=run_dir.parent, lane=lane).run(world))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_lane_without_samples_is_named_and_one_missing_sample_leaves_the_others(tmp_path):
    """The first lane of the second step has lost both of its samples; some other lane has lost one."""
    run_dir = trained(tmp_path / "run", RUNS["missing Gappy"])
    ((nothing, *others),) = run_distributed(lanes_of, 1, run_dir, 2, range(8))
    assert nothing == "lane 0 has no samples in step 2: all are missing. Name another."
    assert any(one["missing"] for one in others)
    for one in others:
        there = [sample for sample in one["samples"] if sample not in one["missing"]]
        assert [sample for sample, _ in one["alone"]] == there
        assert not one["why_not"]


SOURCE = """\
from tests.distributed.tasks import Language

class Own(Language):
    def forward(self, model, batch):
        return model(batch) * {factor}
"""


def test_sources_that_were_edited_between_two_starts_are_named_with_the_start(tmp_path):
    """The replay takes the steps of both starts by the code that is there now."""
    project, run_dir = tmp_path / "project", tmp_path / "run"
    project.mkdir()
    for steps, factor in ((2, 1), (4, 30)):  # of another size: Python keeps what it compiled of equal ones
        (project / "own_sources.py").write_text(SOURCE.format(factor=factor))
        config = kept_in(run_dir, configure("own_sources.Own", num_lanes=2, steps=steps), num_devices=1)
        run_distributed(own_train, 1, replace(config, search_path=str(project)), steps > 2)
    for folder in CheckpointFolder(RunDir(run_dir).checkpoints).all():
        folder.rename(tmp_path / folder.name)
    ((changed, differs),) = run_distributed(own_again, 1, run_dir)
    assert changed == ["modules are not those of the run: own_sources (started at step 1)"]
    assert differs


def own_train(world: World, config: RunConfig, resumes: bool) -> None:
    add_search_path(config.search_path)
    train(world, config, resumes=resumes, allow=["num_steps"])


def own_again(world: World, run_dir: Path) -> tuple[Sequence[str], bool]:
    """Take the steps of both starts again."""
    set_determinism("exact", 1)
    with ReplayJob.of(plan_replay(run_dir, 4, trust=True), observed=[4]) as job:
        add_search_path(job.config.search_path)
        (compared,) = compare_steps(job.plan, *job.run(world)).values()
        return compared.changed_sources, bool(compared.comparison.differing)
