"""What may differ from the checkpoint that a run goes on from, and how a difference is said."""

import dataclasses
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Task
from lanewise.config import DataConfig, EvaluateConfig, OptimizerConfig, RunConfig, SchedulerConfig
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.run import Run
from lanewise.errors import CheckpointError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver
from lanewise.testing import run_distributed
from tests.distributed.optimizers import ScheduleFree
from tests.distributed.tasks import configure, state_bytes


class Line(Task):
    """Learns a line; `offset` makes another dataset, `width` another model."""

    def __init__(self, offset: float = 0.0, width: int = 1):
        self.offset = offset
        self.width = width

    def build_model(self) -> nn.Module:
        return nn.Linear(self.width, 1)

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.arange(24.0).unsqueeze(1).expand(-1, self.width) / 24
        return TensorDataset(inputs, 2 + inputs[:, :1] + self.offset)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[1])


def build(config: RunConfig, world: World | None = None) -> Run:
    set_determinism(config.distributed.equality, threads=1)
    return build_run(config, world or LocalWorld(torch.device("cpu")))


def save(run: Run, path: Path, world: World, step: int) -> None:
    saver = Saver(CheckpointFolder(path), world, keep_last=3, keep_best=0, sign=1)
    saver.save(run.state.take(), Manifest(step, None, run.identity, ()))
    assert saver.finish()
    world.all_gather_tree(None)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint after no step at all."""
    world = LocalWorld(torch.device("cpu"))
    save(build(configure(Line)), tmp_path, world, 3)
    return CheckpointFolder(tmp_path)


def go_on(config: RunConfig, folder: CheckpointFolder, allow: tuple[str, ...] = ()) -> int:
    return resume_run(build(config), folder, allow)


def test_without_a_checkpoint_a_run_begins(tmp_path):
    assert go_on(configure(Line), CheckpointFolder(tmp_path / "none")) == 0


def test_a_run_goes_on_after_the_step_that_was_saved(saved):
    assert go_on(configure(Line), saved) == 3


def test_a_run_that_is_shorter_now_is_an_error(saved):
    with pytest.raises(CheckpointError, match=r"took 3 steps, and this one has 2\. Raise"):
        go_on(configure(Line, steps=2), saved)


def test_larger_batches_are_named_and_not_the_fewer_steps_that_follow(saved):
    """The remedy was to raise the steps, which led to the error about the lanes."""
    with pytest.raises(CheckpointError, match=r"(?s)of another run.*lanes was .*--allow lanes"):
        go_on(configure(Line, num_lanes=16, steps=2), saved)
    with pytest.raises(CheckpointError, match=r"took 3 steps, and this one has 2\. Raise"):
        go_on(configure(Line, num_lanes=16, steps=2), saved, ("lanes",))


def test_another_length_is_no_other_run(saved):
    assert go_on(configure(Line, steps=100), saved) == 3


def test_a_scheduler_that_knows_the_length_must_be_allowed_another(tmp_path):
    def of_length(steps: int) -> RunConfig:
        return dataclasses.replace(configure(Line, steps=steps), scheduler=SchedulerConfig(name="cosine"))

    save(build(of_length(4)), tmp_path, LocalWorld(torch.device("cpu")), 3)
    with pytest.raises(CheckpointError) as error:
        go_on(of_length(9), CheckpointFolder(tmp_path))
    assert str(error.value).startswith(
        f"{tmp_path / 'step-000003'} is of a run of 4 steps, and this one has 9: the learning rate"
    )
    assert go_on(of_length(9), CheckpointFolder(tmp_path), ("num_steps",)) == 3


def test_another_argument_of_the_optimizer_must_be_allowed(saved):
    with pytest.raises(CheckpointError) as error:
        go_on(configure(Line, lr=0.5), saved)
    assert re.search(r"optimizer was .*'lr': 0.01.*, and is .*'lr': 0.5.* now: --allow", str(error.value))
    assert str(error.value).endswith("To resume anyway: --allow optimizer (allow= of train)")


def with_optimizer(name: str, **options: Any) -> RunConfig:
    section = OptimizerConfig(class_path=f"torch.optim.{name}", init_args=options)
    return dataclasses.replace(configure(Grouped), optimizer=section)


class Grouped(Line):
    """Gives the bias a learning rate of its own, which an argument says."""

    def __init__(self, bias_lr: float = 0.1, offset: float = 0.0):
        super().__init__(offset)
        self.bias_lr = bias_lr

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [model.weight], "name": "weight"}, {"params": [model.bias], "lr": self.bias_lr}]


def train_some(config: RunConfig, folder: Path, allow: tuple[str, ...] = (), steps: int = 3) -> Run:
    """Go on from a checkpoint, if there is one, take steps, and save."""
    run = build(config)
    first_step = resume_run(run, CheckpointFolder(folder), allow)
    for _ in Engine(dataclasses.replace(run, last_step=first_step + steps), first_step=first_step).steps():
        pass
    save(run, folder, LocalWorld(torch.device("cpu")), first_step + steps)
    return run


def moments(run: Run) -> list[bytes]:
    states = run.training.optimizer.state.values()
    return [value.numpy().tobytes() for state in states for value in state.values()]


def test_other_options_are_those_of_the_run_that_goes_on_and_the_state_is_kept(tmp_path, caplog):
    """What a group of the task says is an option too, and its argument is only told."""
    begun = train_some(with_optimizer("AdamW", lr=0.01), tmp_path)
    now = with_optimizer("AdamW", lr=0.002, betas=(0.8, 0.9), weight_decay=0.5)
    task = dataclasses.replace(now.task, init_args={"bias_lr": 0.05})
    now = dataclasses.replace(now, task=task)
    run = build(now)
    assert resume_run(run, CheckpointFolder(tmp_path), ("optimizer",)) == 3
    assert moments(run) == moments(begun)
    weight, bias = run.training.optimizer.param_groups
    assert [weight["lr"], bias["lr"], weight["betas"], bias["weight_decay"]] == [0.002, 0.05, (0.8, 0.9), 0.5]
    assert weight["name"] == "weight"
    assert re.search(
        r"checkpoint: optimizer was .*: --allow optimizer sets its options and keeps its state",
        caplog.text,
    )


def test_without_being_allowed_an_argument_of_the_task_leaves_the_options_as_they_were(tmp_path):
    train_some(with_optimizer("AdamW", lr=0.01), tmp_path)
    now = with_optimizer("AdamW", lr=0.01)
    task = dataclasses.replace(now.task, init_args={"bias_lr": 0.05})
    run = train_some(dataclasses.replace(now, task=task), tmp_path)
    assert run.training.optimizer.param_groups[1]["lr"] == 0.1


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("AdamW", {"amsgrad": True}, r"state model\.\w+ max_exp_avg_sq is not in it"),
        ("Adam", {}, r"the optimizer was a torch.optim.adamw.AdamW, and is a torch.optim.adam.Adam now"),
    ],
)
def test_options_that_need_another_state_are_refused(tmp_path, name, options, said):
    train_some(with_optimizer("AdamW", lr=0.01), tmp_path)
    with pytest.raises(CheckpointError, match=said) as error:
        go_on(with_optimizer(name, lr=0.01, **options), CheckpointFolder(tmp_path), ("optimizer",))
    assert str(error.value).endswith("Use its configuration.")


@pytest.mark.parametrize("allow", ["optimizer", "num_steps"])
def test_what_an_optimizer_counts_in_its_groups_is_no_option(tmp_path, allow):
    """An optimizer without a schedule averages by it: the first step of a longer run lost all before it."""

    def of(steps: int, lr: float) -> RunConfig:
        config = configure(Line, steps=steps, optimizer=f"{ScheduleFree.__module__}.ScheduleFree", lr=lr)
        return dataclasses.replace(config, scheduler=SchedulerConfig(name="linear"))

    train_some(of(9, 0.1), tmp_path)
    run = build(of(9, 0.2) if allow == "optimizer" else of(18, 0.1))
    resume_run(run, CheckpointFolder(tmp_path), (allow,))
    (group,) = run.training.optimizer.param_groups
    assert group["k"] == 3
    assert group["lr"] == pytest.approx(0.2 * 6 / 9 if allow == "optimizer" else 0.1 * 15 / 18)


def end(world: World, config: RunConfig, folder: Path) -> dict[str, bytes]:
    run = build(config, world)
    first_step = resume_run(run, CheckpointFolder(folder), ("optimizer",))
    for _ in Engine(run, first_step=first_step).steps():
        pass
    return state_bytes(run.training.model)


@pytest.mark.parametrize("sharded", [{"reducer": "fsdp"}, {"shard_optimizer": True}])
def test_other_options_are_the_same_where_the_state_is_shared_out(tmp_path, sharded):
    train_some(with_optimizer("AdamW", lr=0.01), tmp_path)
    now = with_optimizer("AdamW", lr=0.001, weight_decay=0.2)
    (expected,) = run_distributed(end, 1, now, tmp_path)
    now = dataclasses.replace(now, distributed=dataclasses.replace(now.distributed, **sharded))
    assert run_distributed(end, 2, now, tmp_path) == [expected] * 2


def test_the_error_lists_every_difference_and_what_may_be_allowed(saved):
    config = configure(Line, num_lanes=4, offset=1.0, precision="bf16")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=5))
    with pytest.raises(CheckpointError) as error:
        go_on(config, saved)
    message = str(error.value)
    assert "step-000003 is of another run." in message
    for name in ("lanes", "dataset", "seed", "precision"):
        assert f"\n  {name} was " in message
    assert message.endswith(
        "\nUse its configuration. To resume anyway: --allow dataset,lanes,seed (allow= of train)"
    )


def test_what_may_never_differ_has_no_remedy(saved):
    with pytest.raises(CheckpointError) as error:
        go_on(configure(Line, precision="bf16"), saved)
    assert str(error.value).endswith("\n  precision was float32, and is bf16 now\nUse its configuration.")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("lanes", configure(Line, num_lanes=4)),
        ("dataset", configure(Line, offset=1.0)),
        ("dataset", dataclasses.replace(configure(Line), data=DataConfig(order="sequential"))),
        ("dataset", dataclasses.replace(configure(Line), data=DataConfig(drop_last=True))),
    ],
)
def test_a_difference_that_is_allowed_is_a_warning(saved, caplog, name, config):
    with pytest.raises(CheckpointError, match=f"--allow {name} \\("):
        go_on(config, saved)
    with caplog.at_level(logging.WARNING):
        assert go_on(config, saved, (name,)) == 3
    assert f"resuming although this differs from the checkpoint: {name} was " in caplog.text


def test_exact_and_close_runs_do_not_mix(saved):
    with pytest.raises(CheckpointError, match=r"exact was .*, and is None now"):
        go_on(configure(Line, equality="close"), saved)


def test_a_checkpoint_from_before_there_were_sums_for_metrics_has_none(tmp_path):
    world = LocalWorld(torch.device("cpu"))
    run = build(configure(Line))
    state = run.state.take()
    del state["log"]
    saver = Saver(CheckpointFolder(tmp_path), world, keep_last=1, keep_best=0, sign=1)
    saver.save(state, Manifest(3, None, run.identity, ()))
    assert saver.finish()
    begun = build(configure(Line))
    nothing = begun.log_interval.state_dict()
    assert resume_run(begun, CheckpointFolder(tmp_path), ()) == 3
    assert begun.log_interval.state_dict() == nothing


def test_another_interval_of_metrics_is_no_other_run(saved):
    assert go_on(configure(Line, log_every_steps=7), saved) == 3


def test_a_model_that_does_not_fit_is_an_error(saved):
    with pytest.raises(CheckpointError, match=r"model weight is \(1, 1\) .* and \(1, 2\)"):
        go_on(configure(Line, width=2), saved, ("dataset",))


def test_a_bad_checkpoint_is_skipped_with_a_warning(saved, caplog):
    world = LocalWorld(torch.device("cpu"))
    save(build(configure(Line)), saved.path, world, 5)
    (saved.of_step(5) / "state.json").write_bytes(b"torn")
    assert go_on(configure(Line), saved) == 3
    assert "skipping a checkpoint" in caplog.text


def train_on(world: World, path: str, last_step: int) -> tuple[int, list[float], dict[str, bytes]]:
    """Go on from what is there, train up to a step and save; return where it began and what it gave."""
    run = build(configure(Line, num_lanes=8, steps=9), world)
    step = resume_run(run, CheckpointFolder(Path(path)), ())
    losses = []
    steps = Engine(run, first_step=step).steps()
    for report in steps:
        losses.append(report.totals.loss)
        if report.step + 1 == last_step:
            break
    steps.close()
    save(run, Path(path), world, last_step)
    model = run.training.model.state_dict()
    return step, losses, {name: tensor.numpy().tobytes() for name, tensor in model.items()}


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    alone = LocalWorld(torch.device("cpu"))
    whole = train_on(alone, str(tmp_path / "whole"), 9)
    first = train_on(alone, str(tmp_path / "parts"), 3)
    second, other = run_distributed(train_on, 2, str(tmp_path / "parts"), 6)
    assert other == second
    last = train_on(alone, str(tmp_path / "parts"), 9)
    assert [first[0], second[0], last[0]] == [0, 3, 6]
    assert first[1] + second[1] + last[1] == whole[1]
    assert last[2] == whole[2]


def fail_on(world: World, path: str) -> str:
    run = build(configure(Line), world)
    try:
        resume_run(run, CheckpointFolder(Path(path)), ())
    except CheckpointError as error:
        return str(error)
    return ""


def test_that_no_checkpoint_is_good_is_an_error_on_every_rank(saved):
    (saved.of_step(3) / "state.json").unlink()
    messages = run_distributed(fail_on, 2, str(saved.path))
    assert all("none of the 1 checkpoints" in message for message in messages)


def with_train(**changes: Any) -> RunConfig:
    config = configure(Line)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("max_grad_norm", None, 1.0), ("max_grad_norm", 1.0, 2.0), ("ema_decay", 0.9, 0.5)],
)
def test_what_changes_the_weights_must_be_allowed(tmp_path, caplog, name, before, now):
    save(build(with_train(**{name: before})), tmp_path, LocalWorld(torch.device("cpu")), 3)
    config, folder = with_train(**{name: now}), CheckpointFolder(tmp_path)
    with pytest.raises(
        CheckpointError, match=f"{name} was {before}, and is {now} now\\n.*--allow {name} \\("
    ):
        go_on(config, folder)
    assert go_on(config, folder, (name,)) == 3
    assert (
        f"resuming although this differs from the checkpoint: {name} was {before}, and is {now} now"
        in caplog.text
    )


def test_other_arguments_of_the_task_are_told(saved, caplog):
    assert go_on(configure(Line, width=1), saved) == 3
    assert "resuming although this differs from the checkpoint: task was " in caplog.text


class Judged(Line):
    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {"test": self.train_dataset()}


def test_the_best_value_of_another_metric_is_forgotten(tmp_path, caplog):
    """Less was once better than more of it, so that no later model was ever the best."""
    world = LocalWorld(torch.device("cpu"))

    def judge(mode: Any) -> RunConfig:
        evaluate = EvaluateConfig(best="test/loss", best_mode=mode)
        return dataclasses.replace(configure(Judged), evaluate=evaluate)

    first = build(judge("min"))
    first.evaluation.run()
    save(first, tmp_path, world, 3)
    same, other = build(judge("min")), build(judge("max"))
    for run in (same, other):
        resume_run(run, CheckpointFolder(tmp_path), ())
        assert run.evaluation.last_value == first.evaluation.last_value
    assert same.evaluation.best_value == first.evaluation.best_value
    assert other.evaluation.best_value == -math.inf
    assert (
        "best was {'value': 'test/loss', 'mode': 'min'}, and is {'value': 'test/loss', 'mode': 'max'}"
        in caplog.text
    )


def take_steps(world: World, config: RunConfig, folder: Path, first_step: int, stop: int) -> list[bytes]:
    """Go on from a checkpoint, if there is one, and save after the last step."""
    run = build(config, world)
    resumed = resume_run(run, CheckpointFolder(folder), allow=())
    assert resumed == first_step
    shorter = dataclasses.replace(run, last_step=stop)
    for _ in Engine(shorter, first_step=first_step).steps():
        pass
    save(run, folder, world, stop)
    return [parameter.detach().numpy().tobytes() for parameter in run.training.model.parameters()]


def test_an_optimizer_with_a_closure_goes_on_where_it_was_on_another_number_of_processes(tmp_path):
    """LBFGS keeps lists of earlier steps, and all of it under its first parameter."""
    config = configure(Line, steps=6, optimizer="torch.optim.LBFGS", lr=0.5, width=3)
    whole = run_distributed(take_steps, 1, config, tmp_path / "whole", 0, 6)
    run_distributed(take_steps, 2, config, tmp_path / "cut", 0, 3)
    rest = run_distributed(take_steps, 3, config, tmp_path / "cut", 3, 6)
    assert rest == whole * 3
