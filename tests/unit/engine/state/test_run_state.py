"""A run goes on from its state with the same bytes as if it had never stopped, or not at all."""

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, TensorDataset

from lanewise import Task
from lanewise.config import EvaluateConfig, OptimizerConfig, RunConfig, SchedulerConfig
from lanewise.config.scheduler import SchedulerName
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.state.run_state import RunState
from lanewise.errors import CheckpointError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver, load_state
from tests.distributed.tasks import Language, configure

STEPS, SAVED = 8, 4


class Net(nn.Module):
    """Tied weights, a transposed and an unused parameter, and buffers that every forward changes."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.transposed = nn.Parameter(torch.randn(width, 2).T)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(self.second(torch.tanh(self.first(inputs))))) @ self.transposed.T


class Plane(Task):
    """Two groups of parameters, if asked for."""

    def __init__(self, num_groups: int = 1, width: int = 6):
        self.num_groups = num_groups
        self.width = width

    def build_model(self) -> nn.Module:
        return Net(self.width)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        return TensorDataset(
            torch.randn(40, self.width, generator=generator), torch.randn(40, 2, generator=generator)
        )

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"test": self.train_dataset()}

    def parameter_groups(self, model: nn.Module):
        named = list(model.named_parameters())
        if self.num_groups == 1:
            return named
        return [
            {"params": [(name, value) for name, value in named if "norm" not in name], "weight_decay": 0.1},
            {"params": [(name, value) for name, value in named if "norm" in name], "lr": 1e-3},
        ]

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs.float(), batch[1])


class Halving(LambdaLR):
    """A LambdaLR whose function is an object with state of its own."""

    class Count:
        def __init__(self):
            self.calls = 0

        def __call__(self, step: int) -> float:
            self.calls += 1
            return 0.9**self.calls

    def __init__(self, optimizer):
        super().__init__(optimizer, self.Count())


def plan(
    task: type[Task] = Plane,
    optimizer: str = "torch.optim.AdamW",
    options: Mapping[str, Any] | None = None,
    scheduler: str | None = None,
    scheduler_options: Mapping[str, Any] | None = None,
    precision: str = "float32",
    warmup: float = 0,
    ema_decay: float | None = None,
    *,
    name: SchedulerName | None = None,
    **init_args: Any,
) -> RunConfig:
    config = configure(task, num_lanes=4, steps=STEPS, precision=precision, **init_args)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, ema_decay=ema_decay),
        optimizer=OptimizerConfig(class_path=optimizer, init_args={"lr": 0.02, **(options or {})}),
        scheduler=SchedulerConfig(
            name=name, class_path=scheduler, init_args=dict(scheduler_options or {}), warmup=warmup
        )
        if name or scheduler or warmup
        else None,
    )


def build(config: RunConfig, first_step: int = 0) -> Engine:
    set_determinism("exact", threads=1)
    return Engine(build_run(config, LocalWorld(torch.device("cpu"))), first_step=first_step)


def run(engine: Engine, last_step: int = STEPS) -> list[tuple[float, float]]:
    """Train up to a step; return the losses and learning rates."""
    found = []
    if engine.first_step < last_step:
        steps = engine.steps()
        for report in steps:
            found.append((report.totals.loss, report.interval.learning_rate))
            if report.step + 1 == last_step:
                break
        steps.close()
    return found


def save(engine: Engine, path: Path, step: int = SAVED) -> Any:
    """Save through files; return what they give back."""
    world = LocalWorld(torch.device("cpu"))
    saver = Saver(CheckpointFolder(path), world, keep_last=1, keep_best=0, sign=1)
    state = engine.run.state.take()
    saver.save(state, Manifest(step, None, engine.run.identity, ()))
    assert saver.finish()
    found = CheckpointFolder(path).newest_good(pytest.fail)
    assert found is not None
    return load_state(*found)


def freeze(value: Any) -> Any:
    """Make states comparable byte by byte: a tensor is its dtype, shape and bytes; nan equals nan."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().flatten().numpy().tobytes()
    if isinstance(value, Mapping):
        return type(value) is Counter, {key: freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [freeze(item) for item in value]
    return type(value), repr(value)


def everything(engine: Engine) -> Any:
    return freeze(engine.run.state.take())


MULTI_STEP = {
    "scheduler": "torch.optim.lr_scheduler.MultiStepLR",
    "scheduler_options": {"milestones": [3, 5, 5, 6]},
}
COSINE = {"scheduler": "torch.optim.lr_scheduler.CosineAnnealingLR", "scheduler_options": {"T_max": STEPS}}
ONE_CYCLE = {
    "scheduler": "torch.optim.lr_scheduler.OneCycleLR",
    "scheduler_options": {"max_lr": 0.05, "total_steps": STEPS + 1},
}
PLANS = {
    "plain": {},
    "two groups": {"num_groups": 2},
    "amsgrad": {"options": {"amsgrad": True}},
    "fused": {"options": {"fused": True}},
    "fused, two groups, cosine": {"options": {"fused": True}, "num_groups": 2, **COSINE},
    "fused transformer": {"task": Language, "options": {"fused": True}},
    "foreach": {"options": {"foreach": True}},
    "SGD": {"optimizer": "torch.optim.SGD"},
    "SGD with momentum": {"optimizer": "torch.optim.SGD", "options": {"momentum": 0.9, "nesterov": True}},
    "Adagrad": {"optimizer": "torch.optim.Adagrad"},
    "RMSprop": {"optimizer": "torch.optim.RMSprop", "options": {"centered": True, "momentum": 0.5}},
    "NAdam": {"optimizer": "torch.optim.NAdam"},
    "Adafactor": {"optimizer": "torch.optim.Adafactor"},
    "MultiStepLR": MULTI_STEP,
    "OneCycleLR": ONE_CYCLE,
    "OneCycleLR, SGD": {"optimizer": "torch.optim.SGD", "options": {"momentum": 0.9}, **ONE_CYCLE},
    "CosineAnnealingLR": COSINE,
    "LambdaLR": {"scheduler": f"{__name__}.Halving"},
    "linear": {"name": "linear", "warmup": 2},
    "cosine, in the warm-up": {"name": "cosine", "warmup": 5},
    "wsd, two groups": {"name": "wsd", "warmup": 0.25, "num_groups": 2},
    "warm-up alone": {"warmup": 5},
    "in the warm-up": {"warmup": 5, **COSINE},
    "after the warm-up": {"warmup": 2, **MULTI_STEP},
    "at the end of the warm-up": {"warmup": SAVED, **COSINE},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "EMA": {"ema_decay": 0.9},
    "transformer": {"task": Language, "ema_decay": 0.5, "warmup": 3, **COSINE},
}


SHORT = {
    "plain",
    "fused, two groups, cosine",
    "SGD with momentum",
    "Adafactor",
    "LambdaLR",
    "wsd, two groups",
    "after the warm-up",
    "fp16",
    "transformer",
}
"""What `make test` runs: together they have all that a plan may have."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(plan, marks=() if name in SHORT else pytest.mark.slow, id=name)
        for name, plan in PLANS.items()
    ],
)
def test_a_run_that_goes_on_ends_as_if_it_had_never_stopped(tmp_path, options):
    config = plan(**options)
    whole = build(config)
    expected = run(whole)
    first = build(config)
    assert run(first, SAVED) == expected[:SAVED]
    second = build(config, SAVED)
    second.run.state.restore(save(first, tmp_path))
    assert everything(second) == everything(first)
    assert run(second) == expected[SAVED:]
    assert everything(second) == everything(whole)


def test_a_state_saved_before_any_step_is_the_beginning(tmp_path):
    config = plan(**MULTI_STEP, ema_decay=0.9, precision="fp16")
    whole = build(config)
    expected = run(whole)
    second = build(config)
    second.run.state.restore(save(build(config), tmp_path, 0))
    assert run(second) == expected
    assert everything(second) == everything(whole)


def test_going_on_twice_is_the_same_again(tmp_path):
    config = plan(num_groups=2, **COSINE)
    whole = build(config)
    run(whole)
    engine = build(config)
    for step in (2, 3, 6):
        run(engine, step)
        state = save(engine, tmp_path / str(step), step)
        engine = build(config, step)
        engine.run.state.restore(state)
    run(engine)
    assert everything(engine) == everything(whole)


def test_the_state_has_the_names_of_parameters():
    engine = build(plan(num_groups=2))
    run(engine, 1)
    state = engine.run.state.take()
    assert state["model"].keys() == engine.training.model.state_dict().keys()
    assert {"model.first.weight", "model.transposed", "model.norm.bias"} <= state["optimizer"]["state"].keys()
    assert [group["params"] for group in state["optimizer"]["groups"]] == [
        [f"model.{name}" for name in ("transposed", "never", "first.weight", "first.bias", "second.bias")],
        ["model.norm.weight", "model.norm.bias"],
    ]


def test_restoring_keeps_the_storage_of_the_model(tmp_path):
    first, second = build(plan()), build(plan(), SAVED)
    run(first, SAVED)
    model = second.training.model
    pointers = [value.data_ptr() for value in model.state_dict().values()]
    second.run.state.restore(save(first, tmp_path))
    assert [value.data_ptr() for value in model.state_dict().values()] == pointers
    assert model.second.weight is model.first.weight
    assert not model.transposed.is_contiguous()


def test_a_checkpoint_loads_into_an_optimizer_of_another_implementation(tmp_path):
    first = build(plan(options={"fused": True}))
    run(first, SAVED)
    second = build(plan(options={"foreach": True}), SAVED)
    second.run.state.restore(save(first, tmp_path))
    run(second)


def test_the_best_value_goes_on(tmp_path):
    def with_best():
        config = plan()
        return dataclasses.replace(
            config, evaluate=EvaluateConfig(every_steps=2, best="test/loss", best_mode="min")
        )

    first, second = build(with_best()), build(with_best())
    assert save(first, tmp_path / "a")["best"] == {
        "best": -math.inf, "best_step": None, "last": {}, "is_due": False,
    }  # fmt: skip
    run(first, SAVED)
    first.evaluation.run()
    second.run.state.restore(save(first, tmp_path / "b"))
    assert second.evaluation.best_value == first.evaluation.best_value > -math.inf


def test_the_last_value_goes_on(tmp_path):
    def with_best():
        return dataclasses.replace(plan(), evaluate=EvaluateConfig(every_steps=2, best="test/loss"))

    first, second = build(with_best()), build(with_best())
    first.evaluation.run()
    second.run.state.restore(save(first, tmp_path))
    assert second.evaluation.last_value == first.evaluation.last_value


def state_of(config: RunConfig, num_steps: int = 2) -> Any:
    engine = build(config)
    run(engine, num_steps)
    return copy.deepcopy(engine.run.state.take())


def refuse(config: RunConfig, state: Any) -> str:
    """Compare with what does not fit; return what was said, after which the engine is as it was."""
    engine = build(config)
    run(engine, 1)
    before = everything(engine)
    mistakes = engine.run.state.compare(state)
    assert everything(engine) == before
    return "; ".join(mistakes)


def test_all_that_does_not_fit_is_one_error():
    state = state_of(plan(precision="fp16"))
    model = state["model"]
    del model["norm.running_mean"], state["best"]
    model["foreign"] = torch.zeros(1)
    model["never"] = torch.zeros(4)
    model["first.bias"] = model["first.bias"].double()
    message = refuse(plan(ema_decay=0.9), state)
    for mistake in (
        "average is not in it",
        "best is not in it",
        "it has a state of loss_scale, and this run has none",
        "model norm.running_mean is not in it",
        "model foreign is not in this run",
        "model never is (4,) of torch.float32 in it and (3,) of torch.float32 in this run",
        "model first.bias is (6,) of torch.float64 in it and (6,) of torch.float32 in this run",
    ):
        assert mistake in message


def test_another_width_names_every_tensor():
    message = refuse(plan(width=5), state_of(plan()))
    assert "model norm.weight is (6,)" in message
    assert "model transposed is (2, 6)" in message


def test_other_groups_are_refused():
    assert "optimizer groups has 2 items in it and 1 in this run" in refuse(
        plan(), state_of(plan(num_groups=2))
    )


def test_groups_with_other_parameters_are_refused():
    state = state_of(plan(num_groups=2))
    groups = state["optimizer"]["groups"]
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    message = refuse(plan(num_groups=2), state)
    assert "optimizer groups 0 has other parameters" in message
    assert "optimizer groups 1 has other parameters" in message


def test_another_optimizer_is_refused():
    message = refuse(plan(optimizer="torch.optim.SGD"), state_of(plan()))
    assert "the optimizer was a torch.optim.adamw.AdamW, and is a torch.optim.sgd.SGD now" in message


def test_an_average_of_another_shape_is_refused():
    state = state_of(plan(ema_decay=0.9))
    state["average"]["module.never"] = torch.zeros(7)
    assert "average module.never is (7,)" in refuse(plan(ema_decay=0.9), state)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (COSINE, MULTI_STEP),
        ({"warmup": 2}, {"warmup": 2, **COSINE}),
        ({"warmup": 2, **COSINE}, {"warmup": 2, **MULTI_STEP}),
    ],
    ids=["other", "more", "other after the warm-up"],
)
def test_another_scheduler_is_refused(saved, own):
    assert "scheduler" in refuse(plan(**own), state_of(plan(**saved)))


class Counting(nn.Linear):
    """Counts in extra state, as a number or as a tensor."""

    def __init__(self, width: int, *, is_tensor: bool):
        super().__init__(width, 2)
        self.is_tensor = is_tensor
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.calls) if self.is_tensor else {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state) if self.is_tensor else state["calls"]


class Unsavable(Counting):
    def get_extra_state(self) -> Any:
        return {"calls": object()}


def test_what_cannot_be_saved_is_known_before_any_step():
    """It was an error of the first save, which may come after hours."""
    with pytest.raises(CheckpointError, match=r"model/_extra_state/calls cannot be saved: it is a "):
        RunState({"model": Unsavable(2, is_tensor=False)}).require_savable()


class Written(nn.Linear):
    """Says what state it has besides, and has no way to take it back."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}


def test_extra_state_that_nothing_could_restore_is_known_before_any_step():
    """It was saved, and a resume left it out without a word."""
    model = nn.Sequential(nn.Linear(2, 2), Written(2, 2))
    with pytest.raises(CheckpointError, match=r"model\.1 \(Written\) has get_extra_state and no set_extra"):
        RunState({"model": model}).require_savable()


class Refusing(Written):
    def set_extra_state(self, state: Any) -> None:
        raise ValueError(f"version {state} is not read")


def test_extra_state_that_is_refused_is_one_error():
    """It was raised a second time where the present state was put back, as a traceback of the user's code."""
    state = RunState({"scheduler": torch.optim.lr_scheduler.StepLR(plain(), 1), "model": Refusing(2, 2)})
    with pytest.raises(CheckpointError, match="model does not accept its state: ValueError") as raised:
        state.restore(state.take())
    assert raised.value.__context__ is raised.value.__cause__


def plain() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters())


def test_a_number_is_told_to_be_kept_in_an_object():
    """lanes.checkpoints(epoch=3) was an AttributeError."""
    with pytest.raises(CheckpointError, match="epoch is 3, which has no state_dict: only modules"):
        RunState({"epoch": 3}).require_savable()


class Counted(Plane):
    def __init__(self, is_tensor: bool):
        super().__init__()
        self.is_tensor = is_tensor

    def build_model(self) -> nn.Module:
        return Counting(self.width, is_tensor=self.is_tensor)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_extra_state_goes_on(tmp_path, is_tensor):
    config = plan(Counted, is_tensor=is_tensor)
    first, second = build(config), build(config)
    run(first, SAVED)
    second.run.state.restore(save(first, tmp_path))
    assert second.training.model.calls == first.training.model.calls > 0


class Picky(torch.optim.SGD):
    """An optimizer of the user's that looks at its state."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise LookupError("where is my state?")


def test_an_optimizer_that_does_not_accept_its_state_is_one_error():
    net = nn.Linear(2, 2)
    state = RunState({"model": net, "optimizer": Picky(net.parameters(), lr=0.1)})
    with pytest.raises(CheckpointError, match="optimizer does not accept its state: LookupError"):
        state.restore(state.take())
