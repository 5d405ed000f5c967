"""What is trained: models, data and losses in plain PyTorch, the same for every side."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import turn
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, default_collate

Equality = Literal["close", "exact"]
EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A training of one epoch, whose dataset is as long as its steps need; the learning rate is constant."""

    micro_batch_size: int
    num_micro_batches: int
    """Of an optimizer step, over all processes."""
    num_steps: int = 1
    equality: Equality = "close"
    """lanewise's grade; other sides have none."""

    name: ClassVar[str]
    is_deterministic: ClassVar[bool] = False
    """Whether every side comes to the same loss, but for rounding."""
    shuffle: ClassVar[bool] = True
    optimizer: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    optimizer_options: ClassVar[dict[str, Any]]
    max_grad_norm: ClassVar[float | None] = None

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batch_size * self.num_micro_batches

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a new model."""

    @abstractmethod
    def samples(self) -> Any:
        """Return the data that is read again and again."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss of a micro-batch."""

    def collate(self, samples: list[Any]) -> Any:
        """Make a micro-batch of samples."""
        return default_collate(samples)

    def dataset(self) -> Dataset[Any]:
        """Return the dataset, whose reads wait for the turn of this process."""
        return Repeated(self.samples(), self.global_batch_size * self.num_steps)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimizer of all parameters."""
        return self.optimizer(model.parameters(), **self.optimizer_options)

    def loader(self, rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
        """Return the loader that a user writes: for one process, or for its share of several."""
        dataset = self.dataset()
        sampler: Sampler[int] | None = None
        if world_size > 1:
            sampler = DistributedSampler(dataset, world_size, rank, shuffle=self.shuffle)
        return DataLoader(
            dataset,
            self.micro_batch_size,
            shuffle=self.shuffle if sampler is None else None,
            sampler=sampler,
            collate_fn=self.collate,
        )

    def batches(self, rank: int, world_size: int) -> Iterable[Any]:
        """Return the micro-batches of one process, in the way that costs a hand-written loop least."""
        return self.loader(rank, world_size)

    def final_loss(self, model: nn.Module) -> float:
        """Return the loss of a model on some samples, to know what its training came to."""
        samples = self.samples()
        with torch.no_grad():
            return self.loss(model.eval(), default_collate([samples[index] for index in range(64)])).item()


class Repeated(Dataset[Any]):
    """Samples, again and again up to a length."""

    def __init__(self, samples: Any, num_samples: int) -> None:
        self.samples, self.num_samples = samples, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        turn.current.read(1)
        return self.samples[index % len(self.samples)]


@dataclass(frozen=True, kw_only=True)
class Tiny(Workload):
    """An MLP of 16-32-4 on micro-batches of 8 that lie ready in memory, with SGD."""

    micro_batch_size: int = 8

    name = "tiny"
    is_deterministic = True
    shuffle = False
    optimizer = torch.optim.SGD
    # With 0.01, what sides round differently grows to 2e-4 of the loss in 7,800 steps.
    optimizer_options: ClassVar[dict[str, Any]] = {"lr": 0.001}

    def build_model(self) -> nn.Module:
        """See `Workload`."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def samples(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `Workload`."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(512, 16, generator=generator)
        return list(zip(inputs, torch.arange(512) % 4, strict=True))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """See `Workload`."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def dataset(self) -> "Ready":
        """See `Workload`."""
        return Ready(self.samples(), self.micro_batch_size, self.global_batch_size * self.num_steps)

    def collate(self, samples: list[Any]) -> Any:
        """See `Workload`. The dataset hands out whole micro-batches."""
        return samples[0]

    def batches(self, rank: int, world_size: int) -> Iterable[Any]:
        """See `Workload`. Nobody needs a DataLoader for batches that are ready."""
        dataset = self.dataset()
        for first in range(rank * self.micro_batch_size, len(dataset), world_size * self.micro_batch_size):
            yield dataset.__getitems__(range(first, first + self.micro_batch_size))[0]


class Ready(Dataset[Any]):
    """Micro-batches that lie in memory, for any first sample, of consecutive samples or of every second one.

    However two processes share the samples of a step, they are the same samples.
    """

    def __init__(self, samples: list[Any], micro_batch_size: int, num_samples: int) -> None:
        self.num_samples = num_samples
        self.period = len(samples)
        self.ready = {
            (first, stride, size): default_collate(
                [samples[(first + stride * number) % self.period] for number in range(size)]
            )
            for first in range(self.period)
            for stride, size in ((1, micro_batch_size), (2, micro_batch_size), (1, 1))
        }

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: Any) -> list[Any]:
        """Return one micro-batch."""
        turn.current.read(len(indices))
        stride = indices[1] - indices[0] if len(indices) > 1 else 1
        return [self.ready[indices[0] % self.period, stride, len(indices)]]


class Example(Workload):
    """The model and the data of a task in `examples/`."""

    def build_model(self) -> nn.Module:
        """See `Workload`."""
        model: nn.Module = self._example().build_model()
        return model

    def samples(self) -> Any:
        """See `Workload`."""
        return self._example().train_dataset()

    @abstractmethod
    def _example(self) -> Any:
        """Build the task."""


@dataclass(frozen=True, kw_only=True)
class Digits(Example):
    """The ConvNet of examples/mnist: dropout, BatchNorm, and a random shift of each image as it is read."""

    micro_batch_size: int = 16

    name = "digits"
    optimizer_options: ClassVar[dict[str, Any]] = {"lr": 2e-3}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """See `Workload`."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def _example(self) -> Any:
        sys.path.append(str(EXAMPLES / "mnist"))
        from mnist import Mnist

        return Mnist()


@dataclass(frozen=True, kw_only=True)
class Text(Example):
    """The GPT of examples/char_gpt: dropout, a random window for each read, a clipped gradient."""

    micro_batch_size: int = 8

    name = "text"
    optimizer_options: ClassVar[dict[str, Any]] = {"lr": 1e-3, "weight_decay": 0.1}
    max_grad_norm = 1.0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """See `Workload`."""
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def _example(self) -> Any:
        sys.path.append(str(EXAMPLES / "char_gpt"))
        from char_gpt import CharGPT

        return CharGPT()


WORKLOADS: dict[str, type[Workload]] = {work.name: work for work in (Tiny, Digits, Text)}
