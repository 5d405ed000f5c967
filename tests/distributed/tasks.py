"""Small tasks with what makes equal training hard: dropout, tied and unused parameters, ragged weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise import Loss, Task
from lanewise.config import (
    BatchConfig,
    ClassConfig,
    DistributedConfig,
    LogConfig,
    OptimizerConfig,
    PrecisionName,
    RunConfig,
    TrainConfig,
)
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.shards import whole
from lanewise.processes.world.world import World

VOCABULARY = 31
NUM_SENTENCES = 53


class Sentences(Dataset[torch.Tensor]):
    """Random token sequences of 2 to 9 tokens."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.sentences = [
            torch.randint(
                1, VOCABULARY, (int(torch.randint(2, 10, (), generator=generator)),), generator=generator
            )
            for _ in range(num_samples)
        ]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sentences[index]


class TinyTransformer(nn.Module):
    """Dropout, an embedding used twice, a parameter that some lanes use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.sometimes = nn.Parameter(torch.ones(16))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        if int(tokens.sum()) % 2:
            hidden = hidden * self.sometimes
        return self.head(self.block(hidden, src_key_padding_mask=tokens == 0))


class Language(Task):
    """Predicts the next token, weighted by tokens; sentences are ragged."""

    def __init__(self, num_samples: int = NUM_SENTENCES) -> None:
        self.num_samples = num_samples

    def build_model(self) -> nn.Module:
        return TinyTransformer()

    def train_dataset(self) -> Dataset[Any]:
        return Sentences(self.num_samples)

    def collate(self, samples: list[Any]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss | torch.Tensor:
        targets = batch[:, 1:]
        total = F.cross_entropy(
            outputs[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
        )
        return Loss(total, (targets != 0).sum())


class Smooth(Language):
    """The same in float64 without dropout or a branch, for comparison with a full-batch gradient."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)
        )
        return model.double()


class MeanOfMeans(Smooth):
    """The mistake: a mean over tokens, returned as if it were one over samples."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        loss = super().loss(outputs, batch)
        return loss.sum / loss.weight


def configure(
    task: str | type[Task],
    *,
    num_lanes: int = 8,
    micro_batch_size: int = 2,
    steps: int | None = None,
    equality: str = "exact",
    optimizer: str = "torch.optim.AdamW",
    lr: float = 1e-2,
    precision: PrecisionName = "float32",
    log_every_steps: int = 1,
    **init_args: Any,
) -> RunConfig:
    """Configure a run; left to itself it ends a step after an epoch of the sentences, or after 9 steps."""
    if steps is None:
        steps = min(
            9, math.ceil(init_args.get("num_samples", NUM_SENTENCES) / (num_lanes * micro_batch_size)) + 1
        )
    path = task if isinstance(task, str) else f"{task.__module__}.{task.__qualname__}"
    return RunConfig(
        task=ClassConfig(class_path=path, init_args=init_args),
        batch=BatchConfig(global_batch_size=num_lanes * micro_batch_size, micro_batch_size=micro_batch_size),
        train=TrainConfig(
            run_dir="unused", max_steps=steps, max_grad_norm=1.0 if "Adam" in optimizer else None
        ),
        optimizer=OptimizerConfig(class_path=optimizer, init_args={"lr": lr}),
        precision=precision,
        log=LogConfig(every_steps=log_every_steps),
        distributed=DistributedConfig(equality=equality),
    )


def train(world: World, config: RunConfig) -> tuple[dict[str, bytes], list[float]]:
    """Train in this process of the world; return the bytes of the state and the losses."""
    set_determinism(config.distributed.equality, threads=1)
    engine = build_engine(config, world)
    losses = [report.totals.loss for report in engine.steps()]
    return state_bytes(engine.training.model), losses


def state_bytes(model: nn.Module) -> dict[str, bytes]:
    """Return the bytes of every parameter and buffer. Collective where they are sharded."""
    return {
        name: whole(tensor).cpu().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


def gradients(world: World, config: RunConfig) -> list[dict[str, torch.Tensor]]:
    """Train with an optimizer that only looks; return the gradient that it was given in each step."""
    set_determinism(config.distributed.equality, threads=1)
    engine = build_engine(config, world)
    seen: list[dict[str, torch.Tensor]] = []

    def look() -> None:
        named = engine.training.model.named_parameters()
        seen.append({name: whole(one.grad).clone() for name, one in named if one.grad is not None})

    engine.training.optimizer.register_step_pre_hook(lambda *_: look())
    for _ in engine.steps():
        pass
    return seen


def different(first: Sequence[Any], others: Sequence[Any]) -> list[int]:
    """Name the positions at which results differ from the first."""
    return [index for index, other in enumerate(others) if other != first]
