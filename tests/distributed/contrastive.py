"""Tasks whose losses compare all samples of a step, and the same losses in one graph on one device."""

import os
from collections import UserDict
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task

NUM_CLASSES = 4


class Encoder(nn.Module):
    """Two views of a sample to two embeddings of it; a temperature that only the loss uses."""

    def __init__(self, *, dropout: float, norm: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(16, 8)
        self.temperature = nn.Parameter(torch.tensor([0.3]))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.out(self.dropout(torch.tanh(self.norm(self.hidden(inputs))))), dim=-1)


def info_nce(model: nn.Module, outputs: dict[str, torch.Tensor], _labels: torch.Tensor) -> torch.Tensor:
    first, second = outputs["first"], outputs["second"]
    return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))


def clip(model: nn.Module, outputs: dict[str, torch.Tensor], _labels: torch.Tensor) -> torch.Tensor:
    logits = outputs["first"] @ outputs["second"].T * model.temperature.exp()
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def nt_xent(model: nn.Module, outputs: dict[str, torch.Tensor], _labels: torch.Tensor) -> Loss:
    views = torch.cat([outputs["first"], outputs["second"]])
    logits = (views @ views.T / 0.5).fill_diagonal_(-torch.inf)
    size = len(views) // 2
    targets = torch.arange(2 * size).roll(size)
    return Loss(F.cross_entropy(logits, targets, reduction="sum"), weight=2 * size)


def triplet(model: nn.Module, outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Loss:
    """Of each sample the farthest one of its class and the nearest one of another class."""
    distances = torch.cdist(outputs["first"], outputs["second"])
    is_same = labels[:, None] == labels
    farthest = distances.masked_fill(~is_same, 0.0).amax(1)
    nearest = distances.masked_fill(is_same, torch.inf).amin(1)
    has_other = nearest < torch.inf
    return Loss(F.relu(farthest - nearest + 0.2)[has_other].sum(), has_other.sum())


def dice(model: nn.Module, outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """1 - Dice over all samples, plus cross-entropy: two divisors."""
    logits = outputs["first"][:, :NUM_CLASSES] * 5
    is_class = F.one_hot(labels, NUM_CLASSES)
    overlap = (logits.softmax(-1) * is_class).sum(0)
    score = (2 * overlap + 1) / (logits.softmax(-1).sum(0) + is_class.sum(0) + 1)
    return 1 - score.mean() + F.cross_entropy(logits, labels)


LOSSES = {one.__name__: one for one in (info_nce, clip, nt_xent, triplet, dice)}


class Contrastive(Task):
    """Trains an encoder by one of `LOSSES`."""

    def __init__(
        self,
        loss: str = "info_nce",
        *,
        num_samples: int = 53,
        dropout: float = 0.2,
        norm: bool = False,
        double: bool = False,
    ) -> None:
        self.compute = LOSSES[loss]
        self.num_samples = num_samples
        self.dropout, self.norm, self.dtype = dropout, norm, torch.float64 if double else torch.float32

    def build_model(self) -> nn.Module:
        return Encoder(dropout=self.dropout, norm=self.norm).to(self.dtype)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(self.num_samples, 2, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(NUM_CLASSES, (self.num_samples,), generator=generator)
        return TensorDataset(inputs.to(self.dtype), labels)

    def forward(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        first, second = model(batch[0].flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return {"first": first, "second": second}

    def batch_loss_inputs(self, batch: Any) -> torch.Tensor:
        return batch[1]

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Loss | torch.Tensor:
        return self.compute(model, outputs, inputs)


class ByRows(Contrastive):
    """CLIP's loss, a lane's rows of both matrices of similarities at a time."""

    batch_loss = Task.batch_loss

    def row_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Loss:
        first, second = outputs["first"], outputs["second"]
        targets = torch.arange(len(first), device=first.device)[rows]
        scale = model.temperature.exp()
        loss = F.cross_entropy(first[rows] @ second.T * scale, targets, reduction="sum")
        loss = loss + F.cross_entropy(second[rows] @ first.T * scale, targets, reduction="sum")
        return Loss(loss / 2, weight=len(targets))


class Complex(ByRows):
    """The embeddings are complex numbers, whose similarity is the real part of their product."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        outputs = super().forward(model, batch)
        return {name: torch.view_as_complex(one.unflatten(1, (4, 2))) for name, one in outputs.items()}

    def row_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Loss:
        logits = (outputs["first"][rows] @ outputs["second"].conj().T).real * model.temperature.exp()
        targets = torch.arange(len(outputs["first"]))[rows]
        return Loss(F.cross_entropy(logits, targets, reduction="sum"), weight=len(targets))


class Encoding(UserDict[str, torch.Tensor]):
    """Has a `.to` of its own, as a tokenizer's BatchEncoding."""

    def to(self, device: Any) -> "Encoding":
        return Encoding({name: one.to(device) for name, one in self.items()})


class InContainer(Contrastive):
    """Gives the loss a container with a `.to` of its own, and outputs that have no entries."""

    def batch_loss_inputs(self, batch: Any) -> Any:
        return Encoding(labels=batch[1], none=batch[0].new_zeros(len(batch[1]), 0))

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        assert inputs["none"].shape == (len(inputs["labels"]), 0)
        return super().batch_loss(model, outputs, inputs["labels"])


class Opaque:
    """Tensors that nobody sees from outside."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels

    def to(self, device: Any) -> "Opaque":
        return Opaque(self.labels.to(device))

    def __repr__(self) -> str:
        return "Opaque()"


class InObject(Contrastive):
    def batch_loss_inputs(self, batch: Any) -> Any:
        return Opaque(batch[1])


class Communicates(Contrastive):
    """Talks to the other processes in the forward of a lane."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        torch.distributed.all_reduce(batch[1].sum())
        return super().forward(model, batch)


class Detached(Contrastive):
    def forward(self, model: nn.Module, batch: Any) -> Any:
        return {name: one.detach() for name, one in super().forward(model, batch).items()}


class Pooled(Contrastive):
    """Returns one row for each micro-batch."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return {name: one.mean(0, keepdim=True) for name, one in super().forward(model, batch).items()}


class Ragged(Contrastive):
    """The width of a lane's outputs depends on its samples."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        width = 4 + int(batch[1].sum()) % 4
        return {name: one[:, :width] for name, one in super().forward(model, batch).items()}


class OfRank(Contrastive):
    """The loss depends on the process."""

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        return super().batch_loss(model, outputs, inputs) * (1 + os.getpid() % 1000)


class Gathers(Contrastive):
    """Gathers what it has already."""

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        torch.distributed.all_reduce(inputs.clone())
        return super().batch_loss(model, outputs, inputs)


class Keeps(Contrastive):
    """Keeps something from one forward to the next."""

    calls = 0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        return {name: one * self.calls for name, one in super().forward(model, batch).items()}


class ChangesBuffer(Contrastive):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("seen", torch.zeros(1))
        return model

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        model.seen += 1
        return super().batch_loss(model, outputs, inputs)


class NotFinite(Contrastive):
    """One lane's outputs are not finite."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        outputs = super().forward(model, batch)
        return {name: one / (0.0 if torch.initial_seed() % 5 == 2 else 1.0) for name, one in outputs.items()}


class Both(Contrastive):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs["first"].sum()
