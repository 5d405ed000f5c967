"""A gradient that the task changes before it is used: the same by every reducer, and as by hand."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lanewise import Loss, Task
from lanewise.config import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EveryConfig,
    OrderConfig,
    RunConfig,
)
from lanewise.engine.engine import build_engine
from lanewise.lanes import before_update_seed, model_seed
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.commands.test_verify import _fast_processes, verify  # noqa: F401 - a fixture
from tests.distributed.mistakes import rank
from tests.distributed.optimizers import Sharpness
from tests.distributed.runs.test_log import fit
from tests.distributed.tasks import NUM_SENTENCES, Smooth, configure, state_bytes
from tests.slow import slow

SHARPNESS = f"{Sharpness.__module__}.{Sharpness.__name__}"
NUM_STEPS, GLOBAL_BATCH, MAX_NORM = 8, 8, 0.05


class Shaped(Smooth):
    """Clips by value and by layer, adds noise and a mean of rows of all lanes, and keeps the largest norm."""

    step_state = ("state.largest",)
    dtype = torch.float64

    def build_model(self) -> nn.Module:
        model: Any = super().build_model().to(self.dtype)
        model.state = nn.Identity()
        model.state.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        return model

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return dataclasses.replace(super().loss(outputs, batch), gather={"rows": outputs[:, 0, :8]})

    def before_update(self, model: Any, step: Any) -> None:
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])
        model.state.largest.clamp_(min=norm)
        for one in model.parameters():
            one.grad.clamp_(-1e-2, 1e-2)
            one.grad.mul_(0.03 / max(0.03, one.grad.norm().item()))
            one.grad.add_(torch.randn_like(one.grad), alpha=1e-3 * model.state.largest.item())
        model[1].bias.grad = model[1].bias.grad + 1e-2 * step.gathered["rows"].mean(0).to(self.dtype)


class Half(Shaped):
    dtype = torch.float32


class ByBatch(Shaped):
    """The same of a loss of all samples, padded to one length."""

    def collate(self, samples: list[Any]) -> torch.Tensor:
        batch = super().collate(samples)
        return nn.functional.pad(batch, (0, 9 - batch.shape[1]))

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Loss:
        return Shaped.loss(self, outputs, inputs)

    loss = Task.loss

    def batch_loss_inputs(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


class ByRows(ByBatch):
    batch_loss = Task.batch_loss

    def row_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Loss:
        return Shaped.loss(self, outputs[rows], inputs[rows])


def configured(
    task: type[Task] = Shaped, *, devices: int | None = None, closure: bool = False, **changes: Any
) -> RunConfig:
    """Configure a run whose gradient is clipped after the task has changed it, in a known order."""
    distributed = {"reducer": "ddp", "equality": "exact", "device_type": "cpu", "devices": devices}
    options = {name: changes.pop(name) for name in list(changes) if name in ("shard_optimizer", *distributed)}
    arguments = {"num_lanes": 4, "steps": NUM_STEPS, "optimizer": "torch.optim.SGD", "lr": 0.5, **changes}
    config = configure(task, **arguments)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, max_grad_norm=MAX_NORM),
        optimizer=dataclasses.replace(config.optimizer, closure=closure),
        data=DataConfig(order=OrderConfig(class_path="sequential")),
        distributed=DistributedConfig(**distributed | options),
    )


def train(world: World, configs: list[RunConfig]) -> list[tuple[dict[str, bytes], list[float]]]:
    """Return the state and the norms that lines of metrics have, of each run."""
    results = []
    for config in configs:
        set_determinism(config.distributed.equality, threads=1)
        engine = build_engine(config, world)
        norms = []
        for report in engine.steps():
            assert report.interval is not None
            norms.append(report.interval.columns(1, world.device)["train/grad_norm"])
        results.append((state_bytes(engine.training.model), norms))
    return results


def by_hand() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train on the whole batch of each step, as on one device without lanes."""
    task = Shaped()
    set_random_state(model_seed(0))
    model, dataset = task.build_model(), task.train_dataset()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.5), []
    steps = [range(NUM_SENTENCES)[start : start + GLOBAL_BATCH] for start in range(0, NUM_SENTENCES, 8)]
    for number in range(NUM_STEPS):
        batch = task.collate([dataset[index] for index in steps[number % len(steps)]])
        loss = task.loss(task.forward(model, batch), batch)
        optimizer.zero_grad()
        (loss.sum / loss.weight).backward()
        norms.append(nn.utils.get_total_norm([one.grad for one in model.parameters()]).item())
        set_random_state(before_update_seed(0, number))
        with torch.no_grad():
            task.before_update(model, SimpleNamespace(gathered=loss.gather))
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model.state_dict(), norms


def tensor(of: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(of), dtype=torch.float64)


@pytest.mark.parametrize(("equality", "num_processes"), [("exact", 1), ("close", 3), *slow(("close", 2))])
def test_it_trains_what_a_loop_makes_of_the_whole_batch(equality, num_processes):
    """The reported norm is that before; clipping by the norm that was there before would shrink too much."""
    expected, expected_norms = by_hand()
    first, *others = run_distributed(train, num_processes, [configured(equality=equality)])
    ((state, norms),) = first
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(tensor(state[name]), value.flatten(), rtol=0, atol=1e-13)
    assert all(other == first for other in others)


_TASKS = [
    {},
    {"task": Half, "precision": "fp16"},
    {"task": ByBatch},
    {"optimizer": SHARPNESS, "lr": 0.1, "closure": True},
]
_MORE_TASKS = [
    {"task": Half, "precision": "bf16"},
    {"task": ByRows},
    {"task": ByBatch, "precision": "fp16"},
    {"optimizer": "torch.optim.LBFGS", "lr": 0.1},
]


@pytest.mark.parametrize(
    ("tasks", "num_processes", "options"),
    [
        (_TASKS, 3, {}),
        (_TASKS[:3], 1, {"reducer": "data_parallel", "devices": 3}),
        *slow(
            (_TASKS + _MORE_TASKS, 2, {}),
            (_MORE_TASKS, 3, {}),
            (_TASKS + _MORE_TASKS, 1, {"reducer": "single"}),
            (_TASKS + _MORE_TASKS, 1, {"reducer": "data_parallel", "devices": 2}),
            (_TASKS + _MORE_TASKS, 1, {"reducer": "balanced_data_parallel", "devices": 3}),
        ),
    ],
)
def test_it_is_the_same_by_every_reducer(tasks, num_processes, options):
    (alone,) = run_distributed(train, 1, [configured(**task) for task in tasks])
    for of_rank in run_distributed(train, num_processes, [configured(**task, **options) for task in tasks]):
        for task, expected, found in zip(tasks, alone, of_rank, strict=True):
            assert found == expected, task


def test_it_is_the_same_where_each_process_updates_some_parameters():
    """The gradient is whole there, on every process."""
    adam = {"optimizer": "torch.optim.AdamW", "lr": 1e-2}
    (expected,) = run_distributed(train, 1, [configured(**adam)])
    for found in run_distributed(train, 2, [configured(**adam, shard_optimizer=True)]):
        assert found == expected


def test_it_goes_on_with_another_number_of_processes(tmp_path):
    def parts(*num_processes: int) -> bytes:
        folder = tmp_path / "-".join(map(str, num_processes))
        for part, number in enumerate(num_processes, 1):
            config = configured(steps=10 if part == len(num_processes) else 5 * part)
            every = CheckpointConfig(every=EveryConfig(steps=5), keep_last=9)
            run_distributed(fit, number, dataclasses.replace(config, checkpoint=every), str(folder))
        return Path(folder / "model.safetensors").read_bytes()

    assert parts(1) == parts(3, 1)


class Counted(Half):
    """The second step overflows in fp16; the third has no weight, and a third of all micro-batches."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        number = self.progress.number
        factor = 1e30 if number == 1 else 1.0
        weight = 0.0 if number == 2 or int(batch[0, 0]) % 3 == 0 else loss.weight
        return dataclasses.replace(loss, sum=loss.sum * factor, weight=weight)

    def before_update(self, model: Any, step: Any) -> None:
        assert max(one.grad.abs().max().item() for one in model.parameters()) < 1  # not scaled
        model.state.largest.add_(10**step.progress.number)


def test_it_is_not_called_where_nothing_may_be_updated():
    """A micro-batch of weight 0 is no such step."""
    config = configured(Counted, precision="fp16", steps=4)
    (((state, _),),) = run_distributed(train, 1, [config])
    assert tensor(state["state.largest"]).item() == 1 + 1000


class ReadsRank(Shaped):
    def before_update(self, model: Any, step: Any) -> None:
        model[3].bias.grad.add_(rank())


class KeepsNorms(Shaped):
    """Clips to a mean of the norms so far, which no checkpoint has."""

    def __init__(self, num_samples: int = NUM_SENTENCES) -> None:
        super().__init__(num_samples)
        self.norms: list[float] = []

    def before_update(self, model: Any, step: Any) -> None:
        grads = [one.grad for one in model.parameters()]
        self.norms.append(nn.utils.get_total_norm(grads).item())
        nn.utils.clip_grads_with_norm_(
            model.parameters(), 0.9 * sum(self.norms) / len(self.norms), torch.tensor(self.norms[-1])
        )


class Anneals(Shaped):
    """A limit that grows: it clips less when it is called again."""

    def __init__(self, num_samples: int = NUM_SENTENCES) -> None:
        super().__init__(num_samples)
        self.limit = 1e-3

    def before_update(self, model: Any, step: Any) -> None:
        self.limit *= 2
        nn.utils.clip_grad_value_(model.parameters(), self.limit)


class Logs(KeepsNorms):
    """Keeps what a log shows."""

    def before_update(self, model: Any, step: Any) -> None:
        self.norms.append(nn.utils.get_total_norm([one.grad for one in model.parameters()]).item())
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)


class Replaces(Shaped):
    def before_update(self, model: Any, step: Any) -> None:
        model[1].bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))


def refusal(world: World, config: RunConfig) -> str | None:
    try:
        train(world, [config])
    except Exception as error:  # noqa: BLE001 - each rank tells its own
        return str(error)
    return None


@pytest.mark.parametrize(
    ("task", "options", "expected"),
    [
        (ReadsRank, {}, "gradient of 3.bias differs between ranks 0 and 1 after step 1"),
        (Replaces, {}, "before_update replaced parameter 1.bias, or gave it another shape, in step 1"),
        (Shaped, {"reducer": "fsdp"}, "fsdp gives each process a part of the gradient, and before_update"),
    ],
)
def test_wrong_use_is_one_clear_error_on_every_rank(task, options, expected):
    for told in run_distributed(refusal, 2, configured(task, **options)):
        assert told is not None
        with pytest.raises(RuntimeError, match=expected):
            raise RuntimeError(told)


class LogsNothing(Shaped):
    def before_update(self, model: Any, step: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)


def test_what_it_keeps_for_a_log_changes_nothing():
    ((logs, twin),) = run_distributed(train, 1, [configured(Logs), configured(LogsNothing)])
    assert logs == twin


class DrawsByItself(Shaped):
    def before_update(self, model: Any, step: Any) -> None:
        for one in model.parameters():
            noise = torch.randn(one.shape, generator=torch.Generator().manual_seed(SECONDS.pop()))
            one.grad.add_(noise, alpha=1e-3)


SECONDS = list(range(1000))


# A mean of one norm is that of the same norm twice, so KeepsNorms shows in the next step that verify takes.
@pytest.mark.parametrize(("task", "step"), [(DrawsByItself, 1), *slow((KeepsNorms, 7), (Anneals, 1))])
def test_verify_names_what_it_makes_otherwise(task, step):
    report = verify(configured(task, steps=None))
    evidence = "".join(finding.evidence for finding in report.findings)
    again = f"before_update of step {step}, run again from the same state, gives a different gradient of 0"
    assert again in evidence
