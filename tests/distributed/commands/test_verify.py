"""Planted mistakes are caught and named by processes that are started; correct twins pass."""

import json
import multiprocessing
import os
import random
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from lanewise import Task
from lanewise.cli.main import main
from lanewise.commands.jobs import start as jobs
from lanewise.commands.verify import verify as module
from lanewise.commands.verify.job import VerifyJob
from lanewise.commands.verify.verify_report import VerifyReport
from lanewise.config import DataConfig, OptimizerConfig, RunConfig, SchedulerConfig
from lanewise.errors import ConfigError, LaunchError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.reduce.ddp import DDPReducer
from lanewise.testing import run_distributed
from tests.distributed import mistakes, strangers
from tests.distributed.mistakes import CAUSES, GENERATOR, MODELS, NAMES, one_of_each_twin
from tests.distributed.reduce.test_exact import Compiled
from tests.distributed.tasks import Language, configure
from tests.integration.command import write_config
from tests.slow import slow


def run_job(world: World, job: VerifyJob) -> Any:
    set_determinism("exact", threads=1)
    multiprocessing.set_start_method(
        "fork", force=True
    )  # for loader workers, as in a process of `commands.jobs.start`
    return job.run(world)


def start(job: VerifyJob, *, is_fresh: bool) -> Any:
    """Start processes faster than `commands.jobs.start` does, from the server that has torch."""
    assert is_fresh
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)  # the repeat's would need a server of its own
        try:
            return run_distributed(run_job, job.config.distributed.num_devices or 1, job)[0]
        except RuntimeError as error:
            raise LaunchError(str(error)) from error


@pytest.fixture(autouse=True)
def _fast_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start", start)
    for one in (module, jobs):
        monkeypatch.setattr(one, "prepare_workers", lambda *_: None)


def verify(config: RunConfig, *devices: int, **options: Any) -> VerifyReport:
    report = module.verify(config, devices or [2], num_steps=3, **options)
    json.dumps(report.to_json())
    return report


STARTED = (
    "mean of means",
    "items that know the rank",
    "forward that communicates",
)
"""What `make test` starts processes for: what one process finds, what differs among several, and a hang.

Most others are found in tests/unit/commands/verify/test_probe.py without starting one; `make test-all`
starts all.
"""


def with_both_models(names: Iterable[str], started: Collection[str]) -> list[Any]:
    """Each name with both models, of which `make test` starts one, in turn, of some names."""
    return [
        pytest.param(
            name, model, marks=pytest.mark.slow if name not in started or (position + turn) % 2 else ()
        )
        for position, name in enumerate(names)
        for turn, model in enumerate(MODELS)
    ]


@pytest.mark.parametrize(("name", "model"), with_both_models(CAUSES, STARTED))
def test_a_mistake_is_named(name, model):
    data = DataConfig(num_workers=1 if "worker" in name else 0)
    report = verify(mistakes.config(name, model, wrong=True, data=data))
    assert not report.is_verified
    assert [finding.cause for finding in report.findings] == [CAUSES[name]]
    assert NAMES.get(name, "") in report.findings[0].evidence


TWINS = one_of_each_twin((*CAUSES, *STARTED))


@pytest.mark.parametrize(("name", "model"), with_both_models(TWINS, STARTED[:1]))
def test_the_correct_twin_of_a_mistake_passes(name, model):
    report = verify(mistakes.config(name, model, wrong=False))
    assert (report.is_verified, list(report.findings)) == (True, [])


class OpensInEachProcess(Dataset[Any]):
    """Draws when it opens its file, and so shifts what the first micro-batch of each process draws."""

    def __init__(self) -> None:
        self.process: int | None = None

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.process != os.getpid():
            self.process = os.getpid()
            random.random()
        return torch.tensor([index, random.random(), 1.0, 1.0])


class Opening(Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def train_dataset(self) -> Dataset[Any]:
        return OpensInEachProcess()

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()


@pytest.mark.parametrize("num_workers", [*slow(0), 2])
def test_a_dataset_that_draws_when_it_opens_is_named_where_loader_processes_open_it(num_workers):
    """Without them each process opens it before it trains, when the processes compare their datasets."""
    config = replace(configure(Opening), data=DataConfig(num_workers=num_workers))
    report = verify(config, 2)
    assert report.is_verified == (num_workers == 0)
    if num_workers:
        assert [one.cause for one in report.findings] == ["a sample depends on the loader's process"]
        assert "must draw nothing" in report.findings[0].remedy
    assert any("with another micro_batch_size samples are augmented otherwise" in one for one in report.notes)


ALLOWED = ("task that changes what it gets", "buffer that is not saved", "forward-mode derivatives")


@pytest.mark.parametrize(("name", "model"), with_both_models(ALLOWED, ALLOWED[:1]))
def test_what_training_allows_is_no_mistake(name, model):
    report = verify(mistakes.config(name, model, wrong=False))
    assert (report.is_verified, list(report.findings)) == (True, [])
    assert not any(note.startswith("not tested") for note in report.notes)


ONE_MODEL = [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ONE_MODEL)
def test_noise_of_the_optimizer_itself_is_named(model):
    def noisy(wrong: bool) -> RunConfig:
        optimizer = OptimizerConfig(class_path=f"{mistakes.__name__}.Noisy", init_args={"wrong": wrong})
        return mistakes.config("nothing", model, wrong, optimizer=optimizer)

    (finding,) = verify(noisy(True)).findings
    assert finding.cause == GENERATOR
    assert "optimizer.noise (a generator)" in finding.evidence
    assert verify(noisy(False), 3).is_verified


@pytest.mark.slow
@pytest.mark.parametrize("model", ONE_MODEL)
def test_a_scheduler_that_knows_the_size_is_named(model):
    def scheduled(wrong: bool) -> RunConfig:
        scheduler = SchedulerConfig(
            class_path=f"{mistakes.__name__}.KnowsTheSize", init_args={"wrong": wrong}
        )
        return mistakes.config("nothing", model, wrong, scheduler=scheduler)

    (finding,) = verify(scheduled(True)).findings
    assert finding.cause == CAUSES["groups that know the size"]
    assert finding.evidence == "step 1, lr of group 0 is 0.1 in one process and 0.2 in 2 processes."
    assert verify(scheduled(False)).is_verified


@pytest.mark.slow
@pytest.mark.parametrize("model", ONE_MODEL)
def test_a_named_scheduler_verifies(model):
    """Its steps are those of the whole run, though few of them are taken."""
    scheduler = SchedulerConfig(name="wsd", warmup=0.25)
    report = verify(mistakes.config("nothing", model, False, scheduler=scheduler), 3, resumes=True)
    assert (report.is_verified, list(report.findings)) == (True, [])


@pytest.mark.parametrize("model", ONE_MODEL)
@pytest.mark.parametrize(
    ("mistake", "num_processes", "cause"),
    [
        ("size", 2, "a step depends on the rank, on the number of processes or on state that was not seen"),
        *slow(("process", 1, "the runs diverge for an unknown reason")),
        *slow(("process", 2, "ranks hold different weights")),
    ],
)
def test_an_optimizer_whose_steps_no_probe_sees_to_differ_is_found_by_what_the_layouts_give(
    mistake, num_processes, cause, model
):
    """Within a process all its updates are the same."""
    section = OptimizerConfig(class_path=f"{mistakes.__name__}.Stepping", init_args={"wrong": mistake})
    (finding,) = verify(mistakes.config("nothing", model, False, optimizer=section), num_processes).findings
    assert finding.cause == cause


@pytest.mark.parametrize("model", ONE_MODEL)
def test_a_checkpoint_that_cannot_be_taken_back_is_named(model):
    (finding,) = verify(
        mistakes.config("state that is not taken back", model, True), 1, resumes=True
    ).findings
    assert finding.cause == "a run cannot resume from a checkpoint"
    assert "version 1 is not read" in finding.evidence


def run_job_with_a_wrong_sum(world: World, job: VerifyJob) -> Any:
    """Plant a mistake of a few roundings into the sums of `close` alone."""
    right = DDPReducer._sum_processes

    def wrong(
        reducer: DDPReducer, state: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().mul_(1 + 1e-5)
        return right(reducer, state, bucket)

    DDPReducer._sum_processes = wrong  # type: ignore[method-assign]
    return run_job(world, job)


def test_gradients_of_close_beyond_their_bound_are_named(monkeypatch):
    """With close not judged at all, no test that `make test` runs had failed."""
    monkeypatch.setitem(globals(), "run_job", run_job_with_a_wrong_sum)
    report = verify(configure(Language, num_lanes=4, equality="close"))
    (finding,) = report.findings
    assert finding.cause == "gradients of equality close are farther apart than rounding explains"
    assert finding.evidence.endswith("times its bound in 2 processes.")
    assert 1 < report.layouts[2].close.worst < 1000


FORGETTING = {
    "optimizer": ("Heavy", "velocity"),
    "scheduler": ("Forgetful", "rate"),
}


@pytest.mark.parametrize("model", ONE_MODEL)
@pytest.mark.parametrize("section", ["optimizer", *slow("scheduler")])
def test_state_that_does_not_survive_is_named(section, model):
    name, attribute = FORGETTING[section]

    def forgetting(wrong: bool) -> RunConfig:
        kind = SchedulerConfig if section == "scheduler" else OptimizerConfig
        forgetful = kind(class_path=f"{mistakes.__name__}.{name}", init_args={"wrong": wrong})
        return mistakes.config("nothing", model, wrong, **{section: forgetful})

    (finding,) = verify(forgetting(True), resumes=True).findings
    assert finding.cause == "state that a checkpoint does not hold"
    assert f"{section}.{attribute}" in finding.evidence
    if section == "scheduler":  # not what follows from it
        assert finding.evidence.endswith(f"the checkpoint did not bring back {section}.{attribute}.")
    assert verify(forgetting(False), 3, resumes=True).is_verified


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        strangers.Images,
        pytest.param(strangers.Translation, marks=pytest.mark.slow),
        pytest.param(strangers.Series, marks=pytest.mark.slow),
    ],
)
def test_models_that_nobody_here_wrote_verify(task):
    report = verify(configure(task, num_lanes=5, equality="close"), 3, resumes=True)
    assert (report.is_verified, list(report.findings)) == (True, [])
    for layout in report.layouts[2:]:
        assert 0 < layout.results[0].close.worst < 1
    is_of_batches = task is strangers.Images
    assert any("as BatchNorm does" in note for note in report.notes) == is_of_batches


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_models_of_hugging_face_verify(name):
    report = verify(configure(f"tests.distributed.hugging_face.{name}", num_lanes=4))
    assert (report.is_verified, list(report.findings)) == (True, [])


@pytest.mark.slow
def test_rounding_to_16_bits_is_no_influence_of_the_cut():
    """A GPT in bf16 was said once to let the samples of a micro-batch influence each other."""
    report = verify(mistakes.config("nothing", "SongTask", wrong=False, precision="bf16"), 1)
    assert (report.is_verified, list(report.notes)) == (True, [])


def test_a_resume_needs_two_steps():
    with pytest.raises(ConfigError, match="at least two steps: got --steps 1"):
        module.verify(mistakes.config("nothing", "RowTask", wrong=False), [2], num_steps=1, resumes=True)


def test_the_repeat_has_another_order_of_sets(monkeypatch):
    """A set of texts in collate was verified once where the environment fixed its order."""
    seeds = []

    def noting(job: VerifyJob, *, is_fresh: bool) -> Any:
        seeds.append(job.variables.get("PYTHONHASHSEED", os.environ["PYTHONHASHSEED"]))
        return start(job, is_fresh=is_fresh)

    monkeypatch.setattr(module, "start", noting)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert verify(mistakes.config("nothing", "RowTask", wrong=False), 1).is_verified
    assert seeds == ["1", "2"]
    assert os.environ["PYTHONHASHSEED"] == "1"


def test_a_partial_last_step_is_among_the_steps():
    report = verify(mistakes.config("nothing", "RowTask", wrong=False), 2, 3)
    assert {step: len(recording["samples"]) for step, recording in report.steps.items()} == {1: 4, 3: 4, 4: 4}
    assert report.heading() == (
        "steps 1, 3, 4, step 3 with 13 of 16 samples; 4 lanes; precision float32; "
        "reducer ddp; compared with one process, byte for byte"
    )
    assert [layout.name for layout in report.layouts] == [
        "1 process",
        "1 again",
        "2 processes",
        "3 processes",
    ]


def test_a_task_that_fails_on_several_processes_is_a_finding():
    report = verify(mistakes.config("initial weights of the rank", "RowTask", wrong=True))
    assert [finding.cause for finding in report.findings] == [
        "the initial weights depend on the rank or the number of processes"
    ]
    assert "different models" in report.layouts[2].failure


def test_a_forward_that_changes_parameters_is_the_reason_and_no_layout_is_said_to_agree():
    """It was "not verified, though 1 process and 2 processes agree", of layouts that took no step."""
    report = verify(mistakes.config("decay in the forward", "RowTask", wrong=True))
    *lines, last = report.lines()
    assert last == "not verified: 1 cause found; training would refuse it, so no step was run"
    assert sum("a parameter is changed outside of the optimizer" in line for line in lines) == 1
    assert [list(column.cells)[-1] for column in report.table().columns[:2]] == ["2 processes", "not run"]


class DecaysOnOneRank(Language):
    """Changes a parameter on rank 1 alone."""

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if mistakes.rank() == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(0.9)
        return super().forward(model, batch)


def test_what_one_rank_finds_keeps_the_others_from_waiting_for_it():
    report = verify(configure(DecaysOnOneRank, num_lanes=4), 2)
    assert "a parameter is changed outside of the optimizer" in [one.cause for one in report.findings]
    assert not report.layouts[2].failure


class ForAnyShapes(Compiled):
    """Asks for what `exact` switches off: the second shape that a process meets gets another kernel."""

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
            return super().forward(model, batch)


@pytest.mark.slow
def test_kernels_that_depend_on_what_was_compiled_before_are_seen_on_one_process():
    report = verify(configure(ForAnyShapes, num_lanes=4), 1)
    assert not report.is_verified
    # Whether the loss itself differs, or gradients only, depends on the CPU.
    assert report.layouts[1].differences.keys() & {"loss", "gradients"}


@pytest.mark.slow
def test_an_optimizer_with_a_closure_is_verified_by_the_gradients_that_it_gets():
    report = verify(configure(Language, num_lanes=4, optimizer="torch.optim.LBFGS", lr=0.1), 2)
    assert report.is_verified, report.findings
    assert next(iter(report.steps.values()))["gradients"]


@pytest.mark.slow
def test_an_optimizer_with_a_gradient_and_a_closure_is_verified():
    """Its closure is called with other weights than those of the step, which nothing outside has changed."""
    section = OptimizerConfig(
        class_path="tests.distributed.optimizers.Sharpness", init_args={"lr": 0.1}, closure=True
    )
    report = verify(replace(configure(Language, num_lanes=4), optimizer=section), 2, resumes=True)
    assert report.is_verified, report.findings
    assert next(iter(report.steps.values()))["gradients"]


@pytest.mark.slow
def test_an_optimizer_that_is_shared_out_verifies():
    config = configure(Language, num_lanes=4, equality="close")
    distributed = replace(config.distributed, shard_optimizer=True)
    report = verify(replace(config, distributed=distributed), 3, resumes=True)
    assert report.is_verified, list(report.lines())


@pytest.mark.slow
def test_what_depends_on_the_layout_is_named_once_and_left_out():
    config = configure(Language, num_lanes=4, equality="close")
    distributed = replace(config.distributed, compression="bf16")
    report = verify(replace(config, distributed=distributed))
    assert [finding.evidence for finding in report.findings] == [
        "it was left out of what was run: distributed.compression bf16."
    ]
    assert list(report.lines())[-1].startswith(
        "not verified: 1 cause found, though 1 process and 2 processes agree"
    )


def test_the_command_explains_a_mistake_and_its_exit_code_says_so(tmp_path, capsys):
    batch = {"global_batch_size": 16, "micro_batch_size": 4}
    config = write_config(tmp_path, f"{mistakes.__name__}.Named", batch=batch)
    mistake = "{name: items that know the rank, model: RowTask, wrong: true}"
    arguments = ["--devices", "2", "--steps", "2", "--task.init_args", mistake]
    assert main(["verify", str(config), *arguments]) == 1
    said = capsys.readouterr().out
    assert "found: samples depend on the rank or the number of processes" in said
    assert re.search(r"sample \d+ differs between rank 1 of 2 processes and one process", said)
    assert said.splitlines()[-1].startswith("not verified: 1 cause found")
