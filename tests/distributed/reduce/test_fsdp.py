"""The reducer fsdp on what its collectives could trip over, against a single device."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from lanewise import Loss
from lanewise.config import DistributedConfig, FSDPConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.shards import is_sharded
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.model_file import save_model
from lanewise.testing import run_distributed
from tests.distributed.tasks import VOCABULARY, Language, Sentences, configure, state_bytes, train

SLOW = pytest.mark.slow
"""Of other numbers of processes than the one that `make test` runs."""


class Inner(nn.Linear):
    """A block inside a block; FSDP warns of outputs that are views."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).clone()


class Layer(nn.Module):
    """Dropout, BatchNorm, and parameters that some lanes use, that none uses and that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Inner(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.sometimes = nn.Parameter(torch.ones(16))
        self.never = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, hidden: torch.Tensor, uses_all: bool) -> torch.Tensor:
        if uses_all:
            hidden = hidden * self.sometimes
        normed = self.norm(hidden.flatten(0, 1)).view_as(hidden) * self.frozen
        return hidden + nn.functional.dropout(torch.relu(self.linear(normed)), 0.2, self.training)


class Deep(nn.Module):
    """Layers in a list, one of which runs twice, and one under activation checkpointing; tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        uses_all = bool(int(tokens.sum()) % 2)
        hidden = self.layers[0](hidden, uses_all)
        hidden = checkpoint(self.layers[1], hidden, uses_all, use_reentrant=False)
        hidden = self.layers[2](self.layers[0](hidden, uses_all), uses_all)
        return self.head(hidden)


class Deeper(Language):
    """Some lanes have weight 0, and then a loss that is no number."""

    def build_model(self) -> nn.Module:
        return Deep()

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss | torch.Tensor:
        loss = super().loss(outputs, batch)
        assert isinstance(loss, Loss)
        return Loss(loss.sum * torch.nan, 0) if int(batch.sum()) % 3 == 0 else loss


class Evaluated(Deeper):
    """Has two sets to evaluate on, one of them smaller than the number of lanes."""

    def eval_datasets(self) -> dict[str, Any]:
        return {"large": Sentences(21), "small": Sentences(3)}


class Tokens:
    """A batch of the user's own class, which cannot be sent to another process."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.lock = threading.Lock()

    def to(self, device: torch.device, **options: Any) -> "Tokens":
        return Tokens(self.tokens.to(device, **options))

    def __copy__(self) -> "Tokens":
        return Tokens(self.tokens.clone())


class Scarce(Language):
    """Fewer samples than processes, and a forward that takes its batch apart."""

    def __init__(self) -> None:
        super().__init__(num_samples=2)

    def collate(self, samples: list[Any]) -> Any:
        return {"tokens": Tokens(super().collate(samples))}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        batch["targets"] = batch.pop("tokens").tokens
        return model(batch["targets"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        return super().loss(outputs, batch["targets"])

    def eval_datasets(self) -> dict[str, Any]:
        return {"one": Sentences(1)}


class EvaluatedTransformer(Language):
    """In evaluation mode torch computes its layer in another way, unless it has hooks."""

    def eval_datasets(self) -> dict[str, Any]:
        return {"large": Sentences(21)}


def configured(
    num_devices: int, *, reducer: str = "fsdp", equality: str = "exact", blocks: tuple[str, ...] = ()
) -> RunConfig:
    distributed = DistributedConfig(
        devices=num_devices,
        device_type="cpu",
        reducer=reducer,  # type: ignore[arg-type]
        equality=equality,  # type: ignore[arg-type]
        fsdp=FSDPConfig(blocks=blocks),
    )
    return replace(configure(Deeper), distributed=distributed)


@pytest.fixture(scope="module")
def of_one() -> Any:
    return run_distributed(train, 1, configured(1, reducer="single"))[0]


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_blocks_that_are_found_leave_the_bytes_of_one_device(of_one, num_devices):
    for result in run_distributed(train, num_devices, configured(num_devices)):
        assert result == of_one


def weights_of_lanes(world: World, config: RunConfig) -> list[float]:
    set_determinism("exact", threads=1)
    return [lane.weight for step in build_engine(config, world).steps() for lane in step.totals.lanes]


def test_some_lanes_have_no_weight_and_some_steps_not_all_lanes():
    (weights,) = run_distributed(weights_of_lanes, 1, configured(1, reducer="single"))
    assert 0.0 in weights
    assert len(weights) < 9 * 8


def test_a_process_that_never_had_a_batch_runs_one_of_another():
    """It has to take part in the collectives of every forward."""
    config = configure(Scarce, micro_batch_size=1)
    alone = replace(config, distributed=configured(1, reducer="single").distributed)
    expected = run_distributed(train, 1, alone)[0]
    for result in run_distributed(train, 3, replace(config, distributed=configured(3).distributed)):
        assert result == expected


@pytest.mark.slow
def test_a_process_that_never_had_a_batch_agrees_on_the_loss_scale():
    """In fp16 one collective more comes before the first backward."""
    config = replace(
        configure(Scarce, micro_batch_size=1, precision="fp16"), distributed=configured(3).distributed
    )
    first, *others = run_distributed(train, 3, config)
    assert others == [first] * 2


class Warm(Deep):
    """From the fifth step on it runs one block more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.extra = nn.ModuleList([Inner(16, 16), Inner(16, 16)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.extra[0](self.embedding(tokens))
        if self.count > 4:
            hidden = self.extra[1](hidden)
        return self.head(hidden)


class Counted(Deeper):
    def build_model(self) -> nn.Module:
        return Warm()


def test_a_repeated_pass_begins_with_the_buffers_of_the_step():
    """Otherwise a process that repeats some would run other blocks than the rest, which wait for ever."""
    config = configure(Counted)
    alone = replace(config, distributed=configured(1, reducer="single").distributed)
    expected = run_distributed(train, 1, alone)[0]
    for result in run_distributed(train, 2, replace(config, distributed=configured(2).distributed)):
        assert result == expected


def test_blocks_inside_blocks_leave_the_bytes_of_one_device(of_one):
    for result in run_distributed(train, 2, configured(2, blocks=("Layer", "Inner"))):
        assert result == of_one


def train_on_an_older_torch(world: World, config: RunConfig) -> Any:
    """Before 2.13 FSDP cannot be asked for zeros in place of gradients that a lane does not have."""
    del FSDPModule.set_reduce_scatter_unused_params  # type: ignore[attr-defined]
    return train(world, config)


@pytest.mark.slow
def test_an_older_torch_sends_zeros_as_well(of_one):
    for result in run_distributed(train_on_an_older_torch, 2, configured(2)):
        assert result == of_one


def evaluate_between(world: World, config: RunConfig) -> Any:
    """Train with an average, evaluating it in between; return the values, and both models' bytes."""
    set_determinism("exact", threads=1)
    engine = build_engine(config, world)
    assert engine.evaluation is not None
    values = [engine.evaluation.run()[0] for _ in engine.steps()]
    average = engine.training.average
    assert average is not None
    return values, state_bytes(engine.training.model), state_bytes(average.module)


@pytest.mark.parametrize(
    ("task_class", "blocks", "world_sizes"),
    [
        *(pytest.param(Evaluated, (), sizes, marks=SLOW) for sizes in ((3,), (2, 4))),
        (EvaluatedTransformer, ("TransformerEncoderLayer",), (2,)),
    ],
)
def test_an_average_is_sharded_and_evaluated_like_the_model(task_class, blocks, world_sizes):
    """With three samples, most processes have none to evaluate."""
    runs = []
    for num_devices in (1, *world_sizes):
        reducer = "single" if num_devices == 1 else "fsdp"
        config = configured(num_devices, reducer=reducer, blocks=blocks)
        task = replace(config.task, class_path=f"{__name__}.{task_class.__name__}")
        config = replace(config, task=task, train=replace(config.train, max_steps=4, ema_decay=0.5))
        runs += run_distributed(evaluate_between, num_devices, config)
    assert all(run == runs[0] for run in runs)
    assert len(runs[0][0]) == 4


def dtypes_in_blocks(world: World, config: RunConfig) -> Any:
    """Return the losses, and which dtypes the gathered weights of layers and the gradients have."""
    set_determinism("close", threads=1)
    engine = build_engine(config, world)
    model, seen = engine.training.model, set()

    def look(layer: nn.Module, *_: Any) -> None:
        seen.update(parameter.dtype for parameter in layer.parameters() if not is_sharded(parameter))

    model.block.register_forward_pre_hook(look)
    gradients: set[torch.dtype] = set()
    engine.training.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(one.grad.dtype for one in model.parameters() if one.grad is not None)
    )
    return [report.totals.loss for report in engine.steps()], seen, gradients


def test_weights_travel_in_16_bits_and_gradients_are_added_in_32():
    config = configured(2, equality="close", blocks=("TransformerEncoderLayer",))
    config = replace(config, task=configure(Language).task, precision="bf16")
    (losses, dtypes, _), _ = run_distributed(dtypes_in_blocks, 2, config)
    assert dtypes == {torch.float32}
    fsdp = replace(config.distributed.fsdp, param_dtype="bf16")
    config = replace(config, distributed=replace(config.distributed, fsdp=fsdp))
    for rounded, seen, gradients in run_distributed(dtypes_in_blocks, 2, config):
        assert seen == {torch.bfloat16}
        assert gradients == {torch.float32}
        assert rounded != losses
        assert rounded == pytest.approx(losses, rel=0.02)


def test_batch_norm_cannot_be_gathered_in_16_bits():
    fsdp = FSDPConfig(param_dtype="bf16")
    config = replace(configured(2, equality="close"), precision="bf16")
    config = replace(config, distributed=replace(config.distributed, fsdp=fsdp))
    with pytest.raises(RuntimeError, match=r"TaskError: layers.0.norm is a BatchNorm1d, whose weights"):
        run_distributed(train, 2, config)


class OfHalves(Deeper):
    def build_model(self) -> nn.Module:
        return super().build_model().bfloat16()


def test_parameters_of_16_bits_are_refused_in_exact_on_a_cpu():
    """With SGD it left other bytes than one process, without a word."""
    config = replace(configured(2), task=replace(configured(2).task, class_path=f"{__name__}.OfHalves"))
    said = r"TaskError: distributed.reducer fsdp is not exact on a CPU with parameters of torch.bfloat16"
    with pytest.raises(RuntimeError, match=said):
        run_distributed(train, 2, config)


def save(world: World, config: RunConfig, folder: str) -> list[str]:
    set_determinism("exact", threads=1)
    model = build_engine(config, world).training.model
    save_model(model, Path(folder) / "model.safetensors", world.rank)
    return [name for name, parameter in model.named_parameters() if not is_sharded(parameter)]


def test_the_model_is_saved_whole_and_with_its_ties(tmp_path):
    for num_devices, reducer in [(1, "single"), (3, "fsdp")]:
        (tmp_path / reducer).mkdir()
        results = run_distributed(
            save, num_devices, configured(num_devices, reducer=reducer), str(tmp_path / reducer)
        )
        assert reducer == "single" or results == [[]] * num_devices
    single, fsdp = (tmp_path / name / "model.safetensors" for name in ("single", "fsdp"))
    assert single.read_bytes() == fsdp.read_bytes()
