"""One step: the moving average of the weights, the learning rate, the norm of the gradient, the optimizer."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task
from lanewise.config import EvaluateConfig, OptimizerConfig, RunConfig, SchedulerConfig
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.step.metrics import StepReport
from lanewise.errors import ConfigError, NonFiniteLossError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.optimizers import Sharpness
from tests.distributed.tasks import configure

LR = 0.1


class Line(Task):
    """A linear model on 16 samples, with BatchNorm for its buffers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"test": self.train_dataset()}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[1])


def line(steps: int = 4, train: Mapping[str, Any] | None = None, **sections: Any) -> RunConfig:
    config = configure(Line, num_lanes=4, steps=steps, optimizer="torch.optim.SGD", lr=LR)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **(train or {})), **sections)


def engine_of(config: RunConfig) -> Engine:
    return build_engine(config, LocalWorld(torch.device("cpu")))


def steps_of(engine: Engine) -> Iterator[tuple[StepReport, dict[str, torch.Tensor]]]:
    """Take every step; yield its report and what the model was after it."""
    for report in engine.steps():
        state = engine.training.model.state_dict()
        yield report, {name: value.clone() for name, value in state.items()}


DECAY = 0.75


def test_the_average_begins_with_the_first_step_and_follows_the_recurrence():
    engine = engine_of(line(steps=5, train={"ema_decay": DECAY}))
    weights = {name for name, _ in engine.training.model.named_parameters()}
    expected: dict[str, torch.Tensor] = {}
    for _, state in steps_of(engine):
        for name, value in state.items():
            is_averaged = name in weights and name in expected  # buffers are taken as they are
            expected[name] = DECAY * expected[name] + (1 - DECAY) * value if is_averaged else value
    torch.testing.assert_close(dict(engine.training.evaluated_model.state_dict()), expected)
    assert not torch.equal(expected["0.weight"], engine.training.model[0].weight)


def fit(world, config, folder) -> dict[str, float]:
    set_determinism("exact", 1)
    return build_engine(config, world).fit(RunDir(Path(folder)))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> tuple[dict[str, float], RunDir]:
    """What the last evaluation gave, and the folder of a run with an average, on one process."""
    folder = tmp_path_factory.mktemp("averaged")
    return run_distributed(fit, 1, with_average(), str(folder))[0], RunDir(folder)


def with_average() -> RunConfig:
    evaluate = EvaluateConfig(every_steps=100, best="test/loss", best_mode="min")  # so once, at the end
    return line(train={"ema_decay": DECAY}, evaluate=evaluate)


def loss_of(model_file: Path) -> float:
    task = Line()
    model = task.build_model()
    model.load_state_dict(load_file(model_file))
    batch = task.train_dataset().tensors
    with torch.no_grad():
        return float(task.loss(task.forward(model.eval(), batch), batch))


def test_the_average_is_what_is_evaluated_and_saved(averaged):
    values, run_dir = averaged
    assert values["test/loss"] == pytest.approx(loss_of(run_dir.averaged_model))
    assert values["test/loss"] != pytest.approx(loss_of(run_dir.model))


def test_the_best_model_is_an_average(averaged):
    _, run_dir = averaged
    assert run_dir.best_model.read_bytes() == run_dir.averaged_model.read_bytes()


def test_the_average_has_the_same_bytes_on_two_processes(averaged, tmp_path):
    assert run_distributed(fit, 2, with_average(), str(tmp_path)) == [averaged[0]] * 2
    for file in ("averaged_model", "model"):
        assert getattr(RunDir(tmp_path), file).read_bytes() == getattr(averaged[1], file).read_bytes()


def test_without_a_decay_there_is_no_average(tmp_path):
    engine = engine_of(line(steps=1))
    engine.fit(RunDir(tmp_path))
    assert engine.training.evaluated_model is engine.training.model
    assert not RunDir(tmp_path).averaged_model.exists()


def constant(step: int) -> float:
    return 1.0


def cosine(step: int) -> float:
    return (1 + math.cos(math.pi * step / 5)) / 2


def halves(step: int) -> float:
    return 0.5 ** (step // 2)


SCHEDULERS = pytest.mark.parametrize(
    ("name", "init_args", "factor"),
    [
        (None, {}, constant),
        ("CosineAnnealingLR", {"T_max": 5}, cosine),
        ("CosineAnnealingWarmRestarts", {"T_0": 5}, cosine),
        ("StepLR", {"step_size": 2, "gamma": 0.5}, halves),
    ],
)


def learning_rates(
    config: RunConfig, name: str | None, init_args: Mapping[str, Any], warmup: float = 0
) -> list[float]:
    if name is not None:
        section = SchedulerConfig(
            class_path=f"torch.optim.lr_scheduler.{name}", init_args=init_args, warmup=warmup
        )
        config = dataclasses.replace(config, scheduler=section)
    elif warmup:
        config = dataclasses.replace(config, scheduler=SchedulerConfig(warmup=warmup))
    return [report.interval.learning_rate for report in engine_of(config).steps()]


@SCHEDULERS
@pytest.mark.parametrize("num_warmup", [1, 4])
def test_the_learning_rate_rises_and_then_the_scheduler_begins(num_warmup, name, init_args, factor):
    config = line(steps=num_warmup + 5)
    rising = [(step + 1) / (num_warmup + 1) for step in range(num_warmup)]
    expected = [LR * value for value in (*rising, *map(factor, range(5)))]
    rates = learning_rates(config, name, init_args, num_warmup)
    assert rates == pytest.approx(expected)  # and torch warns of nothing


@SCHEDULERS
def test_without_a_warm_up_the_scheduler_begins_at_once(name, init_args, factor):
    expected = [LR * factor(step) for step in range(5)]
    assert learning_rates(line(steps=5), name, init_args) == pytest.approx(expected)


def first_gradient(max_grad_norm: float | None) -> tuple[float, list[torch.Tensor]]:
    """The norm that the first step reports, and the gradients that its optimizer was given."""
    engine = engine_of(line(steps=1, train={"max_grad_norm": max_grad_norm}))
    given: list[torch.Tensor] = []
    parameters = list(engine.training.model.parameters())
    engine.training.optimizer.register_step_pre_hook(
        lambda *_: given.extend(parameter.grad.clone() for parameter in parameters)
    )
    (report,) = engine.steps()
    return float(report.interval.grad_norm()), given


def test_the_norm_of_the_gradient_is_reported_and_clipped_to_as_torch_does():
    norm, gradients = first_gradient(None)
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    max_norm = norm / 2
    assert norm == float(nn.utils.clip_grad_norm_(parameters, max_norm))
    norm_before_clipping, clipped = first_gradient(max_norm)
    assert norm_before_clipping == norm
    torch.testing.assert_close(clipped, [parameter.grad for parameter in parameters], rtol=0, atol=0)
    assert not torch.equal(clipped[0], gradients[0])


@pytest.mark.parametrize(("name", "value"), [("fused", True), ("foreach", True), ("foreach", False)])
def test_the_optimizer_is_implemented_as_configured(name, value):
    section = OptimizerConfig(class_path="torch.optim.AdamW", init_args={"lr": LR, name: value})
    engine = engine_of(line(steps=2, train={"max_grad_norm": 1.0}, optimizer=section))
    assert engine.training.optimizer.defaults[name] is value
    first, second = (state["0.weight"] for _, state in steps_of(engine))
    assert not torch.equal(first, second)


class Quadratic(Line):
    """Without statistics and random numbers, on as many samples as a step has."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def train_dataset(self) -> Dataset[Any]:
        return torch.utils.data.Subset(super().train_dataset(), range(8))


CLOSURE = {"lr": 1.0, "max_iter": 4, "line_search_fn": "strong_wolfe"}


def lbfgs(task: type[Task], **options: Any) -> RunConfig:
    config = configure(task, num_lanes=4, steps=3, optimizer="torch.optim.LBFGS")
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, init_args={**CLOSURE, **options})
    )


def test_a_closure_is_a_pass_over_the_lanes():
    """So LBFGS takes the steps that it takes by itself on the whole batch."""
    engine = engine_of(lbfgs(Quadratic))
    alone = copy.deepcopy(engine.training.model)
    losses = [report.totals.loss for report in engine.steps()]

    inputs, targets = Line().train_dataset().tensors
    optimizer = torch.optim.LBFGS(alone.parameters(), **CLOSURE)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(alone(inputs[:8]), targets[:8])
        loss.backward()
        return loss.detach()

    expected = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < 0.5 * losses[0]
    for ours, theirs in zip(engine.training.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


SHARPNESS = OptimizerConfig(
    class_path="tests.distributed.optimizers.Sharpness", init_args={"lr": 0.1, "rho": 0.5}, closure=True
)


def test_an_optimizer_may_get_a_gradient_and_a_closure():
    """So SAM takes the steps that it takes by itself on the whole batch."""
    config = configure(Quadratic, num_lanes=4, steps=3, optimizer="torch.optim.SGD")
    config = dataclasses.replace(config, optimizer=SHARPNESS)
    engine = engine_of(config)
    alone = copy.deepcopy(engine.training.model)
    losses = [report.totals.loss for report in engine.steps()]

    inputs, targets = Line().train_dataset().tensors
    optimizer = Sharpness(alone.parameters(), **SHARPNESS.init_args)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(alone(inputs[:8]), targets[:8])
        loss.backward()
        return loss.detach()

    expected = []
    for _ in range(3):
        expected.append(float(closure()))
        optimizer.step(closure)
    assert losses == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(engine.training.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Weightless(Quadratic):
    """Has nothing to learn from."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss(outputs.sum(), 0)


def test_a_step_of_weight_0_calls_no_optimizer_with_a_closure():
    config = dataclasses.replace(configure(Weightless, num_lanes=4, steps=1), optimizer=SHARPNESS)
    (report,) = engine_of(config).steps()
    assert not report.totals.weight


def test_an_optimizer_that_lacks_its_closure_names_the_key():
    section = dataclasses.replace(SHARPNESS, closure=False)
    config = dataclasses.replace(configure(Quadratic, num_lanes=4, steps=1), optimizer=section)
    with pytest.raises(ConfigError, match=r"Sharpness needs a closure: .*\. Set optimizer\.closure=true\."):
        list(engine_of(config).steps())


class Consuming(Quadratic):
    """Takes its batch apart, and changes its tensors."""

    def collate(self, samples: list[Any]) -> Any:
        return {"batch": super().collate(samples)}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        batch["inputs"], batch["targets"] = batch.pop("batch")
        batch["inputs"].add_(1.0)
        return model(batch["inputs"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch["targets"])


def test_each_pass_of_a_closure_gets_the_batch_as_it_was_read():
    several, one = (
        [report.totals.loss for report in engine_of(config).steps()]
        for config in (lbfgs(Consuming), lbfgs(Consuming, max_iter=1))
    )
    assert several[0] == one[0]
    assert several[-1] < several[0]


class Steep(Line):
    """Its loss is finite in the first step, where the root of 0 has a gradient that is not."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (0.0 * outputs.float().pow(2).mean()).sqrt()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_gradient_that_is_not_finite_is_applied_and_the_next_loss_ends_the_run(precision):
    """As in a loop by hand, and as docs/failure.md says; a reader of the step could not tell."""
    steps = steps_of(engine_of(dataclasses.replace(line(precision=precision), task=configure(Steep).task)))
    report, state = next(steps)
    assert report.totals.loss == 0.0
    assert report.interval is not None
    assert math.isnan(report.interval.grad_norm())
    assert state["0.weight"].isnan().all()
    with pytest.raises(NonFiniteLossError, match="the loss is not finite in step 2 "):
        next(steps)


def test_in_fp16_a_gradient_that_is_not_finite_updates_nothing():
    engine = engine_of(dataclasses.replace(line(precision="fp16"), task=configure(Steep).task))
    before = {name: value.clone() for name, value in engine.training.model.state_dict().items()}
    for report, state in steps_of(engine):
        assert not report.totals.loss
        torch.testing.assert_close(state, before, rtol=0, atol=0)
