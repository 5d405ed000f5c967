"""The scheduler of a run; one that follows an evaluation lowers the learning rate alike on every layout."""

import dataclasses
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.config import (
    CheckpointConfig,
    EvaluateConfig,
    EveryConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
)
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.engine.run.scheduler import build_scheduler, named_factor, steps_per_value
from lanewise.errors import CheckpointError, ConfigError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import Smooth, configure
from tests.slow import slow

ONE_CYCLE = SchedulerConfig(
    class_path="torch.optim.lr_scheduler.OneCycleLR", init_args={"max_lr": 0.1, "total_steps": -1}
)
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
LR = 0.5
STEPS = 8


class Stuck(Smooth):
    """Is evaluated, and never gets better by as much as the scheduler asks for."""

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": self.train_dataset()}


def following(*, warmup: float = 0, best: str | None = "held_out/loss", **options: Any) -> RunConfig:
    """A run that is evaluated after every second step, and halves its learning rate each time."""
    config = configure(Stuck, num_lanes=4, steps=STEPS, optimizer="torch.optim.SGD", lr=LR)
    options = {"factor": 0.5, "patience": 0, "threshold": 0.999, **options}
    return dataclasses.replace(
        config,
        scheduler=SchedulerConfig(class_path=PLATEAU, init_args=options, warmup=warmup),
        evaluate=EvaluateConfig(every_steps=2, best=best, best_mode="min"),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=2), keep_last=9),
    )


def configure_scheduled(steps: int, scheduler: SchedulerConfig) -> RunConfig:
    config = configure(Smooth, num_lanes=4, steps=steps, optimizer="torch.optim.SGD", lr=LR)
    every = CheckpointConfig(every=EveryConfig(steps=2), keep_last=9)
    return dataclasses.replace(config, scheduler=scheduler, checkpoint=every)


def train(
    world: World, config: RunConfig, folder: str, allow: tuple[str, ...] = ()
) -> tuple[list[float], dict[str, bytes]]:
    """Go on from what is there and train; return the learning rate of each step, and the weights."""
    set_determinism("exact", 1)
    run = build_run(config, world)
    run_dir = RunDir(Path(folder))
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, allow)
    saving = Saving(run, checkpoints)
    rates: list[float] = []
    run.training.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    Engine(run, first_step=first_step, saving=saving).fit(run_dir)
    world.all_gather_tree(None)
    weights = {name: value.numpy().tobytes() for name, value in run.training.model.state_dict().items()}
    return rates, weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run_distributed(train, 1, following(), str(folder))


def test_the_learning_rate_falls_after_an_evaluation_that_found_nothing_better(whole):
    rates, _ = whole[1]
    assert rates == [LR, LR, LR, LR, LR / 2, LR / 2, LR / 4, LR / 4]


def test_two_processes_end_with_the_same_bytes(whole, tmp_path):
    for result in run_distributed(train, 2, following(), str(tmp_path)):
        assert result == whole[1]


def test_a_run_goes_on_with_its_learning_rate_and_what_was_the_best(whole, tmp_path):
    run_distributed(train, 1, following(), str(tmp_path))
    folder = CheckpointFolder(RunDir(tmp_path).checkpoints)
    for step in (6, 8):  # the run is cut after its fourth step
        for path in folder.of_step(step).iterdir():
            path.unlink()
        folder.of_step(step).rmdir()
    for rates, weights in run_distributed(train, 2, following(), str(tmp_path)):
        assert rates == whole[1][0][4:]
        assert weights == whole[1][1]


@pytest.mark.parametrize("warmup", [*slow(3), 0.375])
def test_a_warm_up_comes_before(tmp_path, warmup):
    ((rates, _),) = run_distributed(train, 1, following(warmup=warmup), str(tmp_path))
    assert rates[:3] == pytest.approx([LR / 4, LR / 2, LR * 3 / 4])
    # The evaluation after step 1 tells nothing; that after step 3 is the first, and the next finds no better.
    assert rates[3:] == pytest.approx([LR, LR, LR, LR / 2, LR / 2])


def test_the_mode_is_that_of_the_best_value():
    config = following()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    for mode in ("min", "max"):
        evaluate = dataclasses.replace(config.evaluate, best_mode=mode)
        _, plateau = build_scheduler(dataclasses.replace(config, evaluate=evaluate), optimizer, STEPS)
        assert plateau is not None
        assert plateau.scheduler.mode == mode


@pytest.mark.parametrize(("options", "mode"), [({"mode": "max"}, "min"), ({"mode": "min"}, "max")])
def test_a_mode_of_its_own_must_be_that_of_the_best_value(options, mode):
    config = following(**options)
    evaluate = dataclasses.replace(config.evaluate, best_mode=mode)
    said = (
        f"mode contradicts evaluate.best_mode: got {options['mode']} and {mode} for held_out/loss. Leave mode"
    )
    with pytest.raises(ConfigError, match=said):
        build_run(dataclasses.replace(config, evaluate=evaluate), LocalWorld(torch.device("cpu")))


def test_a_run_cannot_go_on_with_another_value(whole):
    config = following()
    evaluate = dataclasses.replace(config.evaluate, best_mode="max")
    set_determinism("exact", 1)
    run = build_run(dataclasses.replace(config, evaluate=evaluate), LocalWorld(torch.device("cpu")))
    with pytest.raises(CheckpointError, match=r"scheduler was .*'mode': 'min'.*, and is .*'mode': 'max'"):
        resume_run(run, CheckpointFolder(RunDir(whole[0]).checkpoints), ())


def test_a_value_that_torch_refuses_names_the_section():
    config = dataclasses.replace(configure(Smooth), scheduler=ONE_CYCLE)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    said = (
        r"scheduler: torch\.optim\.lr_scheduler\.OneCycleLR refuses its arguments: .* but got -1\. "
        r"total_steps: auto is the length of the run\."
    )
    with pytest.raises(ConfigError, match=said):
        build_scheduler(config, optimizer, STEPS)


def factors(num_steps: int, **section: Any) -> list[float]:
    factor = named_factor(SchedulerConfig(**section), num_steps)
    return [factor(step) for step in range(num_steps + 1)]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"name": "linear", "warmup": 2}, [1 / 3, 2 / 3, 1, 3 / 4, 1 / 2, 1 / 4, 0]),
        ({"name": "wsd", "warmup": 2, "decay": 2}, [1 / 3, 2 / 3, 1, 1, 1, 1 / 2, 0]),
        ({"name": "wsd"}, [1, 1, 1, 1, 1, 1, 0]),
        ({"name": "wsd", "decay": 0}, [1, 1, 1, 1, 1, 1, 0]),
        ({"name": "cosine", "warmup": 0.5}, [1 / 4, 2 / 4, 3 / 4, 1, 3 / 4, 1 / 4, 0]),
        ({"name": "linear", "warmup": 6}, [1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7, 0]),
        ({"name": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ({"name": "linear", "warmup": 2, "min_lr_factor": 0.2}, [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2]),
        ({"name": "wsd", "decay": 2, "min_lr_factor": 0.5}, [1, 1, 1, 1, 1, 3 / 4, 1 / 2]),
        ({"name": "cosine", "warmup": 2, "num_cycles": 2}, [1 / 3, 2 / 3, 1, 1 / 2, 1, 1 / 2, 0]),
        ({"name": "cosine", "num_cycles": 6}, [1, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_the_learning_rate_of_each_step(section, expected):
    assert factors(6, **section) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_cosine_is_that_of_torch(floor):
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=20, eta_min=floor)
    rates = []
    for _ in range(21):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        theirs.step()
    assert factors(20, name="cosine", min_lr_factor=floor) == pytest.approx(rates, abs=1e-12)


def test_a_cosine_with_cycles_is_that_of_torch():
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(sgd, T_0=5, eta_min=0.1)
    rates = []
    for _ in range(20):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        theirs.step()
    assert factors(20, name="cosine", num_cycles=4, min_lr_factor=0.1)[:-1] == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_without_a_floor_the_factors_have_the_bits_that_they_had(name):
    factor, num_steps = named_factor(SchedulerConfig(name=name, decay=30 if name == "wsd" else None), 77), 77
    for step in range(num_steps + 1):
        decay = 30 if name == "wsd" else num_steps
        rest = min(1.0, (num_steps - step) / decay)
        assert factor(step) == ((1 - math.cos(math.pi * rest)) / 2 if name == "cosine" else rest)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"name": "cosine", "warmup": 7},
            r"scheduler\.warmup of 7 steps must .* a run of 6 steps\. Give a part",
        ),
        (
            {"name": "wsd", "warmup": 2, "decay": 5},
            r"scheduler\.warmup of 2 and scheduler\.decay of 5 steps must fit into the run",
        ),
        (
            {"name": "cosine", "warmup": 2, "num_cycles": 5},
            r"scheduler\.num_cycles of 5 and scheduler\.warmup of 2 steps must fit .* a run of 6 steps",
        ),
    ],
)
def test_a_run_that_is_too_short_is_refused(section, said):
    with pytest.raises(ConfigError, match=said):
        named_factor(SchedulerConfig(**section), 6)


def test_a_plateau_is_built_where_nothing_is_evaluated():
    """`lanewise bench` evaluates nothing, and so knows no mode: "mode must be 'min' or 'max', got null"."""
    config = configure_scheduled(STEPS, SchedulerConfig(class_path=PLATEAU))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=LR)
    _, plateau = build_scheduler(config, optimizer, STEPS)
    assert plateau is not None


def named(steps: int = STEPS, **section: Any) -> RunConfig:
    """A run of three parameters' groups with one learning rate, saved after every second step."""
    config = configure(Stuck, num_lanes=4, steps=steps, optimizer="torch.optim.SGD", lr=LR)
    return dataclasses.replace(
        config,
        scheduler=SchedulerConfig(**section),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=2), keep_last=9),
    )


def cut_back(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step: the run was killed there."""
    checkpoints = CheckpointFolder(RunDir(folder).checkpoints)
    for later in range(step + 1, STEPS + 1):
        if checkpoints.of_step(later).exists():
            for path in checkpoints.of_step(later).iterdir():
                path.unlink()
            checkpoints.of_step(later).rmdir()


@pytest.mark.parametrize("name", ["wsd", *slow("linear", "cosine")])
def test_a_named_scheduler_goes_on_in_its_warm_up_on_any_number_of_processes(tmp_path, name):
    config = named(name=name, warmup=0.5)
    ((rates, weights),) = run_distributed(train, 1, config, str(tmp_path / "whole"))
    factor = named_factor(SchedulerConfig(name=name, warmup=0.5), STEPS)
    assert rates == [LR * factor(step) for step in range(STEPS)]
    for world_size in (2, 3):
        cut_back(tmp_path / "whole", 2)
        for result in run_distributed(train, world_size, config, str(tmp_path / "whole")):
            assert result == (rates[2:], weights)


def test_a_run_of_another_length_is_another_run_unless_it_is_allowed(tmp_path):
    run_distributed(train, 1, named(name="linear"), str(tmp_path))
    cut_back(tmp_path, 4)
    set_determinism("exact", 1)
    longer = named(steps=16, name="linear")
    checkpoints = CheckpointFolder(RunDir(tmp_path).checkpoints)
    said = (
        r"is of a run of 8 steps, and this one has 16: the learning rate of a step by the scheduler, or what "
        r"the task makes of self\.progress, depends on it\. Add --allow num_steps"
    )
    with pytest.raises(CheckpointError, match=said):
        resume_run(build_run(longer, LocalWorld(torch.device("cpu"))), checkpoints, ())
    run = build_run(longer, LocalWorld(torch.device("cpu")))
    assert resume_run(run, checkpoints, ("num_steps",)) == 4
    assert run.training.optimizer.param_groups[0]["lr"] == LR * 12 / 16
    assert [report.interval.learning_rate for report in Engine(run, first_step=4).steps()] == [
        LR * (16 - step) / 16 for step in range(4, 16)
    ]


LENGTHS = {
    "OneCycleLR": {"class_path": ONE_CYCLE.class_path, "init_args": {"max_lr": LR, "total_steps": "auto"}},
    "CosineAnnealingLR": {
        "class_path": "torch.optim.lr_scheduler.CosineAnnealingLR",
        "init_args": {"T_max": "auto"},
        "warmup": 2,
    },
    "a function": {
        "class_path": "transformers.get_cosine_schedule_with_warmup",
        "init_args": {"num_warmup_steps": 2, "num_training_steps": "auto"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(one, marks=() if name == "CosineAnnealingLR" else pytest.mark.slow, id=name)
        for name, one in LENGTHS.items()
    ],
)
def test_auto_is_the_length_of_the_run_also_of_one_that_goes_on_for_longer(tmp_path, section):
    """Each learning rate after the resume is that of a run which had the greater length from the start."""
    short, longer = (configure_scheduled(steps, SchedulerConfig(**section)) for steps in (STEPS, 2 * STEPS))
    ((expected, _),) = run_distributed(train, 1, longer, str(tmp_path / "longer"))
    ((rates, _),) = run_distributed(train, 1, short, str(tmp_path / "short"))
    assert len(set(expected)) > STEPS
    assert rates != expected[:STEPS]
    cut_back(tmp_path / "short", 4)
    for world_size in (1, 2):
        shutil.copytree(tmp_path / "short", tmp_path / str(world_size))
        for found, _ in run_distributed(
            train, world_size, longer, str(tmp_path / str(world_size)), ("num_steps",)
        ):
            assert found == pytest.approx(expected[4:], rel=1e-12)


EPOCH = 7
"""Steps of an epoch of `configure`: 53 samples."""


def by_epochs(epochs: int, class_path: str, **init_args: Any) -> RunConfig:
    """A run of whole epochs whose scheduler counts them, saved after every fifth step."""
    section = SchedulerConfig(class_path=class_path, init_args=init_args, interval="epoch")
    config = configure_scheduled(epochs * EPOCH, section)
    return dataclasses.replace(config, checkpoint=CheckpointConfig(every=EveryConfig(steps=5), keep_last=9))


def test_a_schedule_that_counts_in_epochs_is_stepped_after_each_on_any_number_of_processes(tmp_path):
    """Stepped after each step, a StepLR ended at a rate of 1e-13."""
    config = by_epochs(3, "torch.optim.lr_scheduler.StepLR", step_size=1, gamma=0.5)
    ((rates, weights),) = run_distributed(train, 1, config, str(tmp_path))
    assert rates == [LR] * EPOCH + [LR / 2] * EPOCH + [LR / 4] * EPOCH
    for later in (15, 20, 21):  # killed after step 10, in the second epoch
        for path in (folder := CheckpointFolder(RunDir(tmp_path).checkpoints).of_step(later)).iterdir():
            path.unlink()
        folder.rmdir()
    for result in run_distributed(train, 2, config, str(tmp_path)):
        assert result == (rates[10:], weights)


def test_auto_is_then_the_number_of_epochs_also_of_a_run_that_goes_on_for_longer(tmp_path):
    cosine = "torch.optim.lr_scheduler.CosineAnnealingLR"
    run_distributed(train, 1, by_epochs(2, cosine, T_max="auto"), str(tmp_path))
    config = by_epochs(4, cosine, T_max="auto")
    ((rates, _),) = run_distributed(train, 1, config, str(tmp_path), ("num_steps",))
    expected = [LR * (1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in (2, 3) for _ in range(EPOCH)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_steps_of_a_schedule_are_not_taken_for_epochs_on_a_resume(tmp_path):
    epochs = by_epochs(3, "torch.optim.lr_scheduler.StepLR", step_size=1)
    assert epochs.scheduler is not None
    run_distributed(train, 1, epochs, str(tmp_path))
    steps = dataclasses.replace(epochs, scheduler=dataclasses.replace(epochs.scheduler, interval="step"))
    set_determinism("exact", 1)
    run = build_run(steps, LocalWorld(torch.device("cpu")))
    with pytest.raises(CheckpointError, match=r"scheduler was .*'interval': 'epoch'"):
        resume_run(run, CheckpointFolder(RunDir(tmp_path).checkpoints), ())


def test_epochs_of_a_stream_are_not_counted():
    section = SchedulerConfig(class_path="torch.optim.lr_scheduler.StepLR", interval="epoch")
    with pytest.raises(ConfigError, match=r"interval epoch needs a dataset with a length: got a stream"):
        steps_per_value(configure_scheduled(STEPS, section), None)


class Frozen(Smooth):
    """The embedding waits for the second epoch, as a backbone does."""

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]


def thaw(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: float(epoch >= 1), lambda _: 1.0])


def frozen(steps: int) -> RunConfig:
    config = configure(Frozen, num_lanes=4, steps=steps, lr=0.1)
    section = SchedulerConfig(class_path=f"{__name__}.thaw", interval="epoch")
    every = CheckpointConfig(every=EveryConfig(steps=EPOCH), keep_last=9)
    return dataclasses.replace(config, scheduler=section, checkpoint=every)


def test_a_group_is_frozen_by_a_learning_rate_of_0_in_the_first_epoch(tmp_path):
    """AdamW would move what a forward only detaches, by its weight decay."""
    model = build_run(frozen(1), LocalWorld(torch.device("cpu"))).training.model
    before = {name: value.numpy().tobytes() for name, value in model.state_dict().items()}
    ((_, first),) = run_distributed(train, 1, frozen(EPOCH), str(tmp_path / "resumed"))
    assert {name for name in before if first[name] == before[name]} == {"0.weight"}
    ((rates, whole),) = run_distributed(train, 1, frozen(2 * EPOCH), str(tmp_path / "whole"))
    assert rates == [0.0] * EPOCH + [0.1] * EPOCH
    assert whole["0.weight"] != before["0.weight"]
    for result in run_distributed(train, 2, frozen(2 * EPOCH), str(tmp_path / "resumed")):
        assert result == (rates[EPOCH:], whole)


def test_a_schedule_of_a_fixed_length_says_how_to_get_that_of_the_run():
    config = configure_scheduled(
        STEPS, dataclasses.replace(ONE_CYCLE, init_args={"max_lr": 0.1, "total_steps": 4})
    )
    with pytest.raises(ConfigError, match=r"ends after 4 steps, and the run takes 8: use .*total_steps auto"):
        build_run(config, LocalWorld(torch.device("cpu")))


def make_plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def test_a_function_must_make_what_is_stepped_after_each_step():
    config = configure_scheduled(STEPS, SchedulerConfig(class_path=f"{__name__}.make_plateau"))
    with pytest.raises(ConfigError, match=r"made a ReduceLROnPlateau, which is not stepped after each step"):
        build_run(config, LocalWorld(torch.device("cpu")))


@pytest.mark.parametrize("section", [*slow({"warmup": 2}), {"warmup": 0.25}])
def test_a_warm_up_alone_may_have_a_longer_run(tmp_path, section):
    run_distributed(train, 1, named(**section), str(tmp_path))
    ((rates, _),) = run_distributed(train, 1, named(steps=16, warmup=2), str(tmp_path))
    assert rates == [LR] * 8


def with_options(config: RunConfig, optimizer: str = "torch.optim.SGD", **options: Any) -> RunConfig:
    section = OptimizerConfig(class_path=optimizer, init_args=options)
    return dataclasses.replace(config, optimizer=section)


def copied(folder: Path, to: Path, step: int) -> str:
    """Copy a run, cut back to a step."""
    shutil.copytree(folder, to)
    cut_back(to, step)
    return str(to)


@pytest.mark.parametrize("name", [*slow("linear", "wsd"), "cosine"])
def test_another_learning_rate_scales_the_rest_of_a_schedule_if_it_is_allowed(tmp_path, name):
    """The rates to come are those of a run that had the other one from the start; the momentum is kept."""
    first, other = (with_options(named(name=name, warmup=2), lr=lr, momentum=0.9) for lr in (LR, LR / 8))
    ((expected, _),) = run_distributed(train, 1, other, str(tmp_path / "other"))
    run_distributed(train, 1, first, str(tmp_path / "first"))
    with pytest.raises(CheckpointError, match=r"optimizer was .*\n.*resume anyway: --allow optimizer \("):
        train(LocalWorld(torch.device("cpu")), other, copied(tmp_path / "first", tmp_path / "refused", 4))
    ends = []
    for world_size in (1, 2):
        folder = copied(tmp_path / "first", tmp_path / str(world_size), 4)
        for rates, weights in run_distributed(train, world_size, other, folder, ("optimizer",)):
            assert rates == expected[4:]
            ends.append(weights)
    assert ends[1:] == ends[:1] * 2
    cut_back(tmp_path / "1", 6)  # the next resume is of a run that always had these options
    for allow in ((), ("optimizer",)):
        folder = copied(tmp_path / "1", tmp_path / f"again {allow}", 6)
        assert train(LocalWorld(torch.device("cpu")), other, folder, allow) == (expected[6:], ends[0])


def test_a_rate_that_a_plateau_lowered_stays_until_another_is_given(whole, tmp_path):
    """Another weight decay alone would have set the rate up to where it began."""
    world, first = LocalWorld(torch.device("cpu")), Path(whole[0])
    decayed, lower = (with_options(following(), lr=lr, weight_decay=0.1) for lr in (LR, LR / 100))
    folder = copied(first, tmp_path / "decayed", 6)
    assert train(world, decayed, folder, ("optimizer",))[0] == [LR / 4, LR / 4]
    folder = copied(first, tmp_path / "lower", 6)
    assert train(world, lower, folder, ("optimizer",))[0] == [LR / 100, LR / 100]
