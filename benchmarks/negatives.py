"""The gradient of a contrastive loss on several processes, by each way of sharing negatives.

    python benchmarks/negatives.py

CLIP's loss with a trained temperature, in float64: two encoders, a batch of 64 pairs, on 1, 2 and 4
processes, with the same weights and the same batch on any number. The figure is the relative error
|g - g'| / |g'| of the gradient after DDP has taken its mean over the processes; g' is that of one graph over
the whole batch. The first table has it for the encoders, the second for the temperature. Each round has other
weights and another batch.

"Own negatives" is the usual loss under DDP: a process compares its own pairs. All others gather the
embeddings of all processes first; their names are those of open_clip's options (`src/open_clip/loss.py`).
Without `gather_with_grad` it gathers by `torch.distributed.all_gather`, which has no gradient; with it by
`torch.distributed.nn.all_gather`, whose backward adds up what all processes have for an embedding. With
`local_loss` a process computes the loss of its own pairs against all; without it, that of all pairs, and
where the gather has no gradient it puts its own embeddings back in their place, so that these have one.

Without `gather_with_grad`, `local_loss` lacks what the losses of other processes say of an embedding. With
neither option, which is open_clip's default, the gradient of the encoders is right but for a factor of 1 / N,
and that of the temperature is right; so it is with each gather whose backward returns this process's part
alone. A loss times N mends the encoders and spoils the temperature. With `gather_with_grad` both losses are
right, as long as all processes have equally many pairs and return a mean. The sum over own pairs divided by
the global batch looks like the part of a process, and is too small by N: DDP divides once more.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from section import publish, spread, table
from torch import nn
from torch.distributed.nn import functional as with_gradient
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task
from lanewise.config import RunConfig
from lanewise.config.check import read_section
from lanewise.engine.engine import build_engine
from lanewise.testing import run_distributed

NUM_PROCESSES = (1, 2, 4)
NUM_PAIRS, NUM_LANES = 64, 8

Pairs = tuple[torch.Tensor, torch.Tensor]
Gradients = dict[str, torch.Tensor]


class Encoders(nn.Module):
    """An encoder of each side of a pair, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32))
        self.text = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 32))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[Pairs, torch.Tensor]:
        """Return embeddings [n, 32] of both sides, and what their similarities are multiplied by."""
        embedded = F.normalize(self.image(images)), F.normalize(self.text(texts))
        return embedded, self.temperature.exp()


def build(seed: int) -> tuple[Encoders, Pairs]:
    """Return the model and the batch of a round."""
    torch.manual_seed(seed)
    model = Encoders().double()
    images = torch.randn(NUM_PAIRS, 16, dtype=torch.float64)
    texts = images[:, :12] + 0.5 * torch.randn(NUM_PAIRS, 12, dtype=torch.float64)
    return model, (images, texts)


def clip(own: Pairs, every: Pairs, scale: torch.Tensor, first: int) -> torch.Tensor:
    """Return the mean loss of own pairs among all; the first own one is number `first` of all."""
    targets = torch.arange(first, first + len(own[0]))
    of_images = F.cross_entropy(scale * own[0] @ every[1].T, targets)
    of_texts = F.cross_entropy(scale * own[1] @ every[0].T, targets)
    return (of_images + of_texts) / 2


def gather(own: torch.Tensor, rank: int, *, keeps_own: bool) -> torch.Tensor:
    """Gather without a gradient, but for one's own embeddings if they are put back."""
    gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own.detach())
    if keeps_own:
        gathered[rank] = own
    return torch.cat(gathered)


def gather_with_grad(own: torch.Tensor) -> torch.Tensor:
    """Gather with a gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has another one for what is compiled
        return torch.cat(with_gradient.all_gather(own))


def loss_by_hand(way: str, own: Pairs, scale: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return the loss of one of several processes."""
    first = rank * len(own[0])
    if way == "own negatives":
        return clip(own, own, scale, 0)
    has_gradient = "`gather_with_grad`" in way
    is_local = "`local_loss`" in way
    images, texts = (
        gather_with_grad(one) if has_gradient else gather(one, rank, keeps_own=not is_local) for one in own
    )
    every = images, texts
    loss = clip(own, every, scale, first) if is_local else clip(every, every, scale, 0)
    if "times N" in way:
        return loss * world_size
    return loss / world_size if "divided by N" in way else loss


def by_hand(world: Any, way: str, seed: int) -> Gradients:
    """Return the gradient under DDP; on one process that of one graph."""
    model, (images, texts) = build(seed)
    if world.world_size == 1:
        embedded, scale = model(images, texts)
        clip(embedded, embedded, scale, 0).backward()
    else:
        rows = slice(*(NUM_PAIRS * number // world.world_size for number in (world.rank, world.rank + 1)))
        replica = DistributedDataParallel(model)
        embedded, scale = replica(images[rows], texts[rows])
        loss_by_hand(way, embedded, scale, world.rank, world.world_size).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


class Clip(Task):
    """The same as a task."""

    def __init__(self, seed: int) -> None:
        self.model, self.pairs = build(seed)

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return self.model

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return TensorDataset(*self.pairs)

    def forward(self, model: nn.Module, batch: list[torch.Tensor]) -> Pairs:
        """See `Task`."""
        embedded, _ = model(*batch)
        pairs: Pairs = embedded
        return pairs


class ByBatch(Clip):
    """Computes the loss of all pairs."""

    def batch_loss(self, model: Any, outputs: Pairs, inputs: None) -> torch.Tensor:
        """See `Task`."""
        return clip(outputs, outputs, model.temperature.exp(), 0)


class ByRows(Clip):
    """Computes the loss of a lane's pairs among all."""

    def row_loss(self, model: Any, outputs: Pairs, inputs: None, rows: slice) -> Loss | torch.Tensor:
        """See `Task`."""
        own = outputs[0][rows], outputs[1][rows]
        return clip(own, outputs, model.temperature.exp(), rows.start)


LANEWISE: dict[str, type[Clip]] = {"lanewise, `batch_loss`": ByBatch, "lanewise, `row_loss`": ByRows}
WAYS = (
    "own negatives",
    "`local_loss`",
    "open_clip's defaults",
    "open_clip's defaults, times N",
    "`gather_with_grad`",
    "`gather_with_grad` `local_loss`",
    "`gather_with_grad` `local_loss`, divided by N",
    *LANEWISE,
)


def by_lanewise(world: Any, way: str, seed: int) -> Gradients:
    """Return the gradient of one step."""
    sections = {
        "task": {"class_path": "negatives.Clip", "init_args": {"seed": seed}},
        "batch": {"global_batch_size": NUM_PAIRS, "micro_batch_size": NUM_PAIRS // NUM_LANES},
        "train": {"max_steps": 1, "run_dir": "run"},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}},
        "distributed": {"device_type": "cpu"},
    }
    engine = build_engine(read_section(RunConfig, sections), world, LANEWISE[way](seed))
    found: Gradients = {}

    def look(*_: Any) -> None:
        named = engine.training.model.named_parameters()
        found.update({name: one.grad.clone() for name, one in named if one.grad is not None})

    engine.training.optimizer.register_step_pre_hook(look)
    for _ in engine.steps():
        pass
    return found


def relative_error(found: Gradients, expected: Gradients, names: Sequence[str]) -> float:
    """Compare the gradients of some parameters as one vector."""
    one, other = (torch.cat([gradients[name].flatten() for name in names]) for gradients in (found, expected))
    error: float = ((one - other).norm() / other.norm()).item()
    return error


def written(errors: list[float]) -> str:
    """Write errors; those of rounding by their magnitude."""
    return f"below {10**-13:.0e}" if max(errors) < 1e-13 else spread(errors, ".3f")


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table for the encoders, and one for the temperature."""
    found = {
        (way, num_processes, seed): run_distributed(
            by_lanewise if way in LANEWISE else by_hand, num_processes, way, seed
        )[0]
        for way in WAYS
        for num_processes in NUM_PROCESSES
        for seed in range(num_rounds)
    }
    names = [name for name, _ in Encoders().named_parameters()]
    tables = []
    for title, is_temperature in (("encoders", False), ("temperature", True)):
        rows = []
        for way in WAYS:
            cells = []
            for num_processes in NUM_PROCESSES:
                errors = [
                    relative_error(
                        found[way, num_processes, seed],
                        found["own negatives", 1, seed],
                        [name for name in names if (name == "temperature") == is_temperature],
                    )
                    for seed in range(num_rounds)
                ]
                cells.append(written(errors))
            rows.append([way, *cells])
        processes = [f"{number} process{'es' * (number > 1)}" for number in NUM_PROCESSES]
        tables.append(table([title, *processes], rows))
    yield from tables


if __name__ == "__main__":
    publish("Negatives of other processes", __doc__, measure, num_rounds=5)
