"""Planted mistakes: what makes the number of processes matter. Each has a correct twin and two models.

A mistake that only one of the two models can make is made by that one.
"""

import copy
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, get_worker_info
from torchmetrics import Metric

from lanewise import Loss, Task
from lanewise.config import (
    BatchConfig,
    ClassConfig,
    DistributedConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from lanewise.errors import TaskError

NUM_SAMPLES, WIDTH = 45, 6
MODELS = ("RowTask", "SongTask")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Rows(Dataset[Any]):
    """Rows of numbers, each with a mask of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        self.masks = torch.rand(NUM_SAMPLES, WIDTH, generator=generator) < 0.6
        self.masks[:, 0] = True

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.masks[index]


class Songs(Dataset[Any]):
    """Sequences of 2 to 7 notes, as token numbers from 1 on."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(2, 8, (NUM_SAMPLES,), generator=generator).tolist()
        self.songs = [torch.randint(1, 9, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.songs)

    def __getitem__(self, index: int) -> Any:
        return self.songs[index]


class Planted(Task):
    """Correct. A mistake overrides one of the small methods, and does the right thing unless `wrong`."""

    TWIN = ""
    """Names what the mistake does if it is not made; several have the same twin."""

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong

    @abstractmethod
    def network(self) -> nn.Module:
        """Return the model, before a mistake wraps it."""

    @abstractmethod
    def samples(self) -> Dataset[Any]:
        """Return the dataset, before a mistake wraps it."""

    @abstractmethod
    def errors(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of every unit: an element of a row, a note."""

    def build_model(self) -> nn.Module:
        return self.network()

    def train_dataset(self) -> Dataset[Any]:
        return self.samples()

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": self.samples()}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.errors(model, batch)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        return Loss(outputs.sum(), outputs.numel())


class RowTask(Planted):
    def network(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, WIDTH)
        )

    def samples(self) -> Dataset[Any]:
        return Rows()

    def errors(self, model: nn.Module, batch: Any) -> torch.Tensor:
        rows, masks = batch
        return (model(rows) - rows).square()[masks]


class Singer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes = nn.Embedding(9, 8, padding_idx=0)
        self.memory = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 9)

    def forward(self, songs: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.memory(F.dropout(self.notes(songs), 0.1, self.training))
        return self.out(hidden)


class SongTask(Planted):
    def network(self) -> nn.Module:
        return Singer()

    def samples(self) -> Dataset[Any]:
        return Songs()

    def collate(self, samples: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def errors(self, model: nn.Module, batch: Any) -> torch.Tensor:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        return F.cross_entropy(logits[targets > 0], targets[targets > 0], reduction="none")


class Nothing(Planted):
    """Is right in any case."""


class ChangesWhatItGets(Planted):
    """Correct, though its forward and its collate change what they get: each gets it once."""

    def collate(self, samples: list[Any]) -> Any:
        if isinstance(samples[0], tuple):
            given, samples[:] = list(samples), []
            return super().collate(given)
        for song in samples:
            song.add_(1).sub_(1)
        return super().collate(samples)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if isinstance(batch, list):
            batch[0].mul_(0.5)
        return super().forward(model, batch)


class Forgets(Planted):
    """Correct: its statistics are in a buffer that is not saved."""

    def network(self) -> nn.Module:
        network = Within(super().network(), "buffer")
        network.register_buffer("kept_level", torch.zeros(()), persistent=False)
        return network


class OfTheProcess(Planted):
    """Seeds itself by its process, or by nothing."""

    def build_model(self) -> nn.Module:
        if self.wrong:
            torch.manual_seed(os.getpid())
        return super().build_model()


class OfTheRank(Planted):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        with torch.no_grad():
            next(model.parameters()).add_(rank() if self.wrong else 0)
        return model


class MeanOfMeans(Planted):
    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        return outputs.mean() if self.wrong else super().loss(outputs, batch)


class SumAndMean(Planted):
    """Adds the mean of some of its units to the sum of all, or their sum."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        if isinstance(batch, list):
            is_high = batch[0][batch[1]] > 0
        else:
            is_high = batch[:, 1:][batch[:, 1:] > 0] > 4
        high = (outputs * is_high).sum() / (is_high.sum().clamp(1) if self.wrong else 1)
        return Loss(outputs.sum() + high, outputs.numel())


class OfTheRow(Planted):
    """Aims at what the micro-batch has in the mean, as labels that are smoothed by it, or at nothing."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        given = batch[0] if isinstance(batch, list) else batch.float()
        return Loss((outputs - (given.mean() if self.wrong else 0)).square().sum(), outputs.numel())


class Penalised(Planted):
    """Penalises the weights once for each micro-batch, or for each unit."""

    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        return self.model

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        penalty = sum(weight.square().sum() for weight in self.model.parameters())
        return Loss(outputs.sum() + penalty * (1 if self.wrong else outputs.numel()), outputs.numel())


class Read(Dataset[Any]):
    """Reads from another dataset and adds something to what is a tensor of floats, or shifts the notes."""

    def __init__(self, inner: Dataset[Any], what: str) -> None:
        self.inner = inner
        self.what = what
        self.count = 0
        self.generator = torch.Generator().manual_seed(3) if "generator" in what else None
        self.constant = int.from_bytes(os.urandom(4)) if what == "process" else 0
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.inner) // (world_size() if self.what == "part" else 1)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if self.what == "part":
            index = index * world_size() + rank()
        if self.what == "moved":
            index = (index + rank() * NUM_SAMPLES // 2) % NUM_SAMPLES
        sample = self.inner[index]
        if "cached" in self.what:
            sample = self.cache.setdefault(index, sample)
        self.count += 1
        if self.what == "seeded generator":
            self.generator.manual_seed(index)
        info = get_worker_info()
        amount = {
            "": 0,
            "default": int(torch.randint(8, ())),
            "generator": int(torch.randint(8, (), generator=self.generator)),
            "rare generator": int(torch.randint(2**30, (), generator=self.generator) == 0),
            "seeded generator": int(torch.randint(8, (), generator=self.generator)),
            "time": time.time_ns() // 1000,
            "rank": rank(),
            "process": self.constant,
            "count": self.count,
            "worker": 0 if info is None else 1 + info.id,
            "part": 0,
            "moved": 0,
            "thousandth count": int(self.count % 1000 == 0),
            "cached": int(torch.randint(8, ())),
            "cached with it": self.cache.setdefault(-1 - index, int(torch.randint(8, ())))
            if self.what == "cached with it"
            else 0,
        }[self.what]
        return shifted(sample, amount)


def shifted(sample: Any, amount: int) -> Any:
    """Add something to what is a tensor of floats, or shift the notes."""
    if isinstance(sample, tuple):
        return sample[0] + amount % 2**20 / 2**20, *sample[1:]
    # Three bits for each note, so that two amounts are hardly ever the same.
    shifts = torch.tensor([(amount >> 3 * position) % 8 for position in range(len(sample))])
    return (sample + shifts) % 8 + 1


def reading(what: str, twin: str) -> Any:
    class Reading(Planted):
        TWIN = f"reads {twin}"

        def samples(self) -> Dataset[Any]:
            return Read(super().samples(), what if self.wrong else twin)

    return Reading


class Slot:
    """A sample in an object without a dict."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Slots(Dataset[Any]):
    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return Slot(self.inner[index])


class InSlots(Planted):
    def samples(self) -> Dataset[Any]:
        return Slots(Read(super().samples(), "rank" if self.wrong else ""))

    def collate(self, samples: list[Any]) -> Any:
        return super().collate([sample.inner for sample in samples])


class EvaluatesOthers(Planted):
    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": Read(super().samples(), "generator" if self.wrong else "default")}


class CollatesByProcess(Planted):
    """Shifts what it collates by the number of its process, as a set of texts has its order."""

    def collate(self, samples: list[Any]) -> Any:
        return super().collate([shifted(sample, os.getpid() if self.wrong else 0) for sample in samples])


class RefusesSeveral(Planted):
    """Was written for one process, and says so."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        if self.wrong and world_size() > 1:
            raise TaskError(f"it trains on one process: got {world_size()}.")
        return super().loss(outputs, batch)


class WithExtraState(nn.Module):
    """Says what state it has besides, and refuses it where it is to take it back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise ValueError(f"version {state['version']} is not read")


class TakesNoneBack(Planted):
    def network(self) -> nn.Module:
        return WithExtraState(super().network()) if self.wrong else super().network()


class LeavesOut(Planted):
    def collate(self, samples: list[Any]) -> Any:
        return super().collate(samples[: 3 if self.wrong else None])


class TiresOfSamples(Planted):
    """Counts its micro-batches, and turns every seventh around, or only counts."""

    calls = 0

    def collate(self, samples: list[Any]) -> Any:
        self.calls += 1
        return super().collate(samples[:: -1 if self.wrong and self.calls % 7 == 0 else 1])


class Differentiates(Planted):
    """Correct: its forward has derivatives of its own, forward-mode ones with zeros that have no elements."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        _, slope = torch.func.jvp(
            lambda given: given * given.detach(), (outputs,), (torch.ones_like(outputs),)
        )
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(outputs, torch.ones_like(outputs))
            tangent = forward_ad.unpack_dual(dual.detach() + dual).tangent
        assert tangent is not None
        return super().loss(outputs + 0.1 * slope.square() + 0.1 * tangent, batch)


class TakesOne(Planted):
    """Correct with micro-batches of one sample, which it takes as they are."""

    def collate(self, samples: list[Any]) -> Any:
        return super().collate(samples[:1])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss | torch.Tensor:
        return outputs.mean()


class Within(nn.Module):
    """Multiplies by something that ought to be 1, or nearly."""

    def __init__(self, inner: nn.Module, what: str) -> None:
        super().__init__()
        self.inner = inner
        self.what = what
        self.noise = torch.Generator().manual_seed(4) if "generator" in what else None
        self.level = torch.zeros(())
        self.register_buffer("kept_level", torch.zeros(()))
        self.teacher = nn.Parameter(torch.ones(1), requires_grad=False)
        self.count = 0
        self.kept: Any = None
        self.memo: dict[Any, torch.Tensor] = {}
        self.teachers = [copy.deepcopy(inner)] if what == "listed teacher" else []
        self.follower = copy.deepcopy(inner).requires_grad_(False) if what == "follower" else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:  # noqa: C901 - one case for each mistake
        self.count += "count" in self.what
        if self.what == "reseeded":
            torch.manual_seed(time.time_ns())
        if self.what == "decay":
            with torch.no_grad():
                for parameter in self.inner.parameters():
                    parameter.mul_(0.999)
        result = self.inner(given)
        spread = result.detach().square().mean()
        match self.what:
            case "generator":
                return result * (1 + 0.1 * torch.rand(result.shape, generator=self.noise))
            case "default":
                return result * (1 + 0.1 * torch.rand(result.shape))
            case "rare generator":
                return result * (1.5 if torch.rand((), generator=self.noise) < 0.2 else 1)
            case "rare default":
                return result * (1.5 if torch.rand(()) < 0.2 else 1)
            case "hardly used generator":
                return result * (1.5 if torch.rand((), generator=self.noise) < 1e-6 else 1)
            case "unused generator":
                return result * (torch.rand((), generator=self.noise) if torch.rand(()) < 1e-6 else 1)
            case "seeded generator":
                self.noise.manual_seed(torch.initial_seed())
                return result * (1 + 0.1 * torch.rand(result.shape, generator=self.noise))
            case "follower":  # which equals what it follows until an update
                for weight, learnt in zip(self.follower.parameters(), self.inner.parameters(), strict=True):
                    weight.data.lerp_(learnt.data, 0.1)
                return result + 0.1 * self.follower(given)
            case "seventh count":
                return result * (1 + (self.count % 7 == 0))
            case "hundredth count":
                return result * (1 + (self.count % 100 == 0))
            case "threshold":
                self.level = 0.99 * self.level + 0.01 * spread
                return result * (1 + (self.level > 100 * spread))
            case "listed teacher":
                with torch.no_grad():
                    for weight, learnt in zip(
                        self.teachers[0].parameters(), self.inner.parameters(), strict=True
                    ):
                        weight.lerp_(learnt, 0.1)
                return result + 0.1 * self.teachers[0](given).detach()
            case "in place":
                level = self.kept_level
                level += 0.1 * spread
                return result * (1 + level)
            case "global":
                return result * (1 + seen_before(spread))
            case "kept noise":
                return result * (1 + 0.1 * kept_noise())
            case "late count":
                if self.count > 6:
                    self.level = 0.9 * self.level + 0.1 * spread
                return result * (1 + self.level)
            case "first":
                self.kept = spread if self.kept is None else self.kept
                return result * (1 + self.kept)
            case "last":
                before, self.kept = spread if self.kept is None else self.kept, spread
                return result * (1 + before)
            case "memo":
                return result * self.memo.setdefault(result.shape, torch.ones_like(result).detach())
            case "level of evaluation":
                if self.training:
                    return result * (1 + self.level)
                self.level = 0.9 * self.level + 0.1 * spread
            case "time":
                return result * (1 + time.time_ns() % 1000 / 10_000)
            case "process":
                return result * (1 + os.getpid() % 1000 / 10_000)
            case "rank":
                return result * (1 + 0.1 * rank())
            case "size":
                return result / world_size()
            case "kernel":
                return custom_operator(wrong=True)(result)
            case "steady kernel":
                return custom_operator(wrong=False)(result)
            case "level in training":
                self.level = 0.9 * self.level + 0.1 * spread
                return result * (1 + self.level)
            case "level in evaluation":
                if self.training:
                    self.level = 0.9 * self.level + 0.1 * spread
                    return result
                return result * (1 + self.level)
            case "buffer":
                if self.training:
                    self.kept_level.mul_(0.9).add_(0.1 * spread)
                    return result
                return result * (1 + self.kept_level)
            case "teacher":
                with torch.no_grad():
                    self.teacher.mul_(0.9).add_(0.1 * spread)
                return result
            case "talk":
                mean = spread.clone()
                if dist.is_initialized():
                    dist.all_reduce(mean)
                return result / (1 + mean / world_size())
        return result


SEEN = {"level": 0.0}


def seen_before(spread: torch.Tensor) -> float:
    SEEN["level"] = 0.9 * SEEN["level"] + 0.1 * float(spread)
    return SEEN["level"]


@cache
def kept_noise() -> torch.Tensor:
    return torch.rand(())


def within(what: str, twin: str) -> Any:
    class Computing(Planted):
        TWIN = f"computes {twin}"

        def network(self) -> nn.Module:
            return Within(super().network(), what if self.wrong else twin)

    return Computing


@cache
def custom_operator(wrong: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Register an operator; torch then looks through every module that is imported, so only who needs it."""

    def unsteady(given: torch.Tensor) -> torch.Tensor:
        return given * (1 + int.from_bytes(os.urandom(1)) / 2560)

    def steady(given: torch.Tensor) -> torch.Tensor:
        return given * 1.5

    operator = torch.library.custom_op(
        f"mistakes::{'unsteady' if wrong else 'steady'}", unsteady if wrong else steady, mutates_args=()
    )
    operator.register_autograd(lambda _, gradient: gradient if wrong else gradient * 1.5)
    return operator


class KnowsTheSize(LRScheduler):
    """Raises the learning rate with the number of processes, as people once learnt to do by hand."""

    def __init__(self, optimizer: torch.optim.Optimizer, wrong: bool) -> None:
        self.factor = world_size() if wrong else 2
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * self.factor for rate in self.base_lrs]


class GroupsKnowTheSize(Planted):
    def parameter_groups(self, model: nn.Module) -> Any:
        return [{"params": list(model.named_parameters()), "lr": 0.1 * (world_size() if self.wrong else 1)}]


class MeanError(Metric):
    """Keeps a mean, which two copies cannot merge, or a sum and a count."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, errors: torch.Tensor) -> None:
        self.total += errors.sum()
        self.count += errors.numel()
        self.mean = self.total / self.count

    def compute(self) -> torch.Tensor:
        return self.mean if self.wrong else self.total / self.count


class MeanOfMicroBatches(Metric):
    """Averages over micro-batches, or over units."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, errors: torch.Tensor) -> None:
        self.total += errors.mean() if self.wrong else errors.sum()
        self.count += 1 if self.wrong else errors.numel()

    def compute(self) -> torch.Tensor:
        return self.total / self.count


class LargestError(Metric):
    """Keeps the largest error in a plain attribute, or in a state."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.seen = torch.zeros(())
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, errors: torch.Tensor) -> None:
        self.seen = torch.maximum(self.seen, errors.max())
        self.largest = torch.maximum(self.largest, errors.max())

    def compute(self) -> torch.Tensor:
        return self.seen if self.wrong else self.largest


def measuring(metric: type[Metric]) -> Any:
    class Measuring(Planted):
        def build_metrics(self) -> Mapping[str, Metric]:
            return {"error": metric(self.wrong)}

        def update_metrics(self, metrics: Mapping[str, Metric], outputs: Any, batch: Any) -> None:
            metrics["error"].update(outputs)

    return Measuring


class Stepping(torch.optim.SGD):
    """Takes longer steps on several processes, or in a process with a higher number, or always the same."""

    def __init__(self, parameters: Any, wrong: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.wrong = wrong

    def step(self, closure: Any = None) -> None:
        factor = {"": 1, "size": world_size(), "process": 1 + os.getpid() % 1000 / 1000}[self.wrong]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        super().step()


class Heavy(torch.optim.SGD):
    """Has momentum of its own, in an attribute that no state dict has, or in the state."""

    def __init__(self, parameters: Any, wrong: bool) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.0 if wrong else 0.9)
        self.velocity: dict[Any, torch.Tensor] = {}
        self.wrong = wrong

    def step(self, closure: Any = None) -> None:
        if self.wrong:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        old = self.velocity.get(parameter, torch.zeros_like(parameter))
                        self.velocity[parameter] = parameter.grad = 0.9 * old + parameter.grad
        super().step()


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, from a generator of its own or from the default one."""

    def __init__(self, parameters: Any, wrong: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.noise = torch.Generator().manual_seed(5) if wrong else None

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.add_(torch.randn(parameter.shape, generator=self.noise), alpha=0.01)


class Forgetful(LRScheduler):
    """Halves the rate with each step, in an attribute that it leaves out of its state, or keeps in it."""

    def __init__(self, optimizer: torch.optim.Optimizer, wrong: bool) -> None:
        self.wrong = wrong
        self.rate = 0.2
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.rate /= 2
        return [self.rate for _ in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "rate" or not self.wrong}


def both(mistake: Any, name: str) -> dict[str, Any]:
    """Make the mistake with each of the two models."""
    made = {
        f"{name} {base.__name__}": type(f"{name} {base.__name__}", (mistake, base), {"__module__": __name__})
        for base in (RowTask, SongTask)
    }
    globals().update(made)  # where pickle finds them
    return made


TASKS: dict[str, Any] = {
    **both(MeanOfMeans, "mean of means"),
    **both(SumAndMean, "sum and mean"),
    **both(OfTheRow, "targets of the micro-batch"),
    **both(Penalised, "penalty for each micro-batch"),
    **both(reading("generator", "default"), "generator of the dataset"),
    **both(reading("time", "default"), "time in the dataset"),
    **both(reading("count", ""), "items that drift"),
    **both(reading("worker", ""), "items that know their worker"),
    **both(reading("process", ""), "items of the process"),
    **both(reading("rank", ""), "items that know the rank"),
    **both(reading("part", ""), "dataset that shards itself"),
    **both(reading("moved", ""), "dataset that begins elsewhere"),
    **both(within("generator", "default"), "generator of the model"),
    **both(within("time", "default"), "time in the forward"),
    **both(within("rank", ""), "forward that knows the rank"),
    **both(within("size", ""), "forward that divides by the number of processes"),
    **both(within("kernel", "steady kernel"), "kernel"),
    **both(within("level in training", "buffer"), "running level in training"),
    **both(within("level in evaluation", "buffer"), "running level in evaluation"),
    **both(within("decay", ""), "decay in the forward"),
    **both(within("teacher", "buffer"), "teacher"),
    **both(within("talk", ""), "forward that communicates"),
    **both(GroupsKnowTheSize, "groups that know the size"),
    **both(measuring(MeanError), "mean as a state"),
    **both(measuring(LargestError), "metric with an attribute"),
    **both(measuring(MeanOfMicroBatches), "metric of micro-batches"),
    **both(ChangesWhatItGets, "task that changes what it gets"),
    **both(Forgets, "buffer that is not saved"),
    **both(within("reseeded", "default"), "seeds in the forward"),
    **both(within("rare generator", "rare default"), "generator that the model uses rarely"),
    **both(within("hardly used generator", "seeded generator"), "generator that the model hardly uses"),
    **both(within("unused generator", "seeded generator"), "generator that the model holds"),
    **both(reading("rare generator", "seeded generator"), "generator that the dataset hardly uses"),
    **both(within("follower", ""), "teacher that follows"),
    **both(within("seventh count", "count"), "every seventh forward"),
    **both(within("late count", "count"), "running level that starts late"),
    **both(within("hundredth count", "count"), "every hundredth forward"),
    **both(within("threshold", "buffer"), "threshold that learns"),
    **both(within("listed teacher", ""), "teacher in a list"),
    **both(within("in place", "buffer"), "buffer that grows in place"),
    **both(within("global", "buffer"), "level of a function's module"),
    **both(within("kept noise", "default"), "noise that is kept"),
    **both(reading("thousandth count", ""), "every thousandth sample"),
    **both(within("first", "memo"), "first micro-batch"),
    **both(within("last", "memo"), "last micro-batch"),
    **both(within("level of evaluation", "buffer"), "running level of evaluations"),
    **both(reading("cached with it", "cached"), "cached augmentation"),
    **both(InSlots, "slots that know the rank"),
    **both(EvaluatesOthers, "generator of the eval dataset"),
    **both(LeavesOut, "collate that leaves one out"),
    **both(TiresOfSamples, "collate that counts"),
    **both(Differentiates, "forward-mode derivatives"),
    **both(TakesOne, "collate that takes one"),
    **both(OfTheRank, "initial weights of the rank"),
    **both(OfTheProcess, "initial weights of the process"),
    **both(CollatesByProcess, "collate that knows its process"),
    **both(within("process", ""), "forward that knows its process"),
    **both(RefusesSeveral, "loss that refuses several processes"),
    **both(TakesNoneBack, "state that is not taken back"),
    **both(Nothing, "nothing"),
}


READS = "a sample differs from read to read"
GENERATOR = "random numbers from a generator that lanewise does not seed"
OWN_GENERATOR = "a generator of random numbers that lanewise does not seed"
HIDDEN = "state outside of parameters and buffers"
OUTSIDE = "a parameter is changed outside of the optimizer"
SEVERAL = "a micro-batch differs from read to read"
TERMS = "a term of the loss has weights or targets of its micro-batch"
NO_MERGE = "a metric cannot be computed from merged states"

CAUSES = {
    "mean of means": "the loss is a mean of means",
    "sum and mean": TERMS,
    "targets of the micro-batch": TERMS,
    "penalty for each micro-batch": "the loss has a term that counts once for each micro-batch",
    "generator of the dataset": READS,
    "time in the dataset": READS,
    "items that drift": READS,
    "items that know their worker": "a sample depends on the loader's process",
    "items of the process": "samples depend on the process or the time",
    "items that know the rank": "samples depend on the rank or the number of processes",
    "dataset that shards itself": "the dataset shards itself by rank",
    "dataset that begins elsewhere": "the dataset shards itself by rank",
    "generator of the model": GENERATOR,
    "time in the forward": "a value from outside of the model changes from forward to forward",
    "forward that knows the rank": "the forward or the loss depends on the rank or the number of processes",
    "forward that divides by the number of processes": (
        "the forward or the loss depends on the rank or the number of processes"
    ),
    "kernel": "an operator is not deterministic",
    "running level in training": HIDDEN,
    "running level in evaluation": HIDDEN,
    "decay in the forward": OUTSIDE,
    "teacher": OUTSIDE,
    "forward that communicates": "the forward depends on other processes",
    "groups that know the size": (
        "the learning rate or another option of the optimizer depends on the number of processes"
    ),
    "mean as a state": NO_MERGE,
    "metric with an attribute": NO_MERGE,
    "metric of micro-batches": "a metric is a mean of means",
    "seeds in the forward": "the random state is set by the task",
    "generator that the model uses rarely": GENERATOR,
    "generator that the model hardly uses": OWN_GENERATOR,
    "generator that the model holds": OWN_GENERATOR,
    "generator that the dataset hardly uses": OWN_GENERATOR,
    "teacher that follows": OUTSIDE,
    "every seventh forward": HIDDEN,
    "running level that starts late": HIDDEN,
    "every hundredth forward": HIDDEN,
    "threshold that learns": HIDDEN,
    "teacher in a list": HIDDEN,
    "buffer that grows in place": "an evaluation changes a buffer",
    "level of a function's module": HIDDEN,
    "noise that is kept": HIDDEN,
    "every thousandth sample": SEVERAL,
    "first micro-batch": HIDDEN,
    "last micro-batch": HIDDEN,
    "running level of evaluations": HIDDEN,
    "cached augmentation": "samples of an epoch depend on an earlier epoch",
    "slots that know the rank": "samples depend on the rank or the number of processes",
    "generator of the eval dataset": READS,
    "initial weights of the process": "the initial weights depend on the process or the time",
    "collate that knows its process": "collate depends on the process",
    "forward that knows its process": "the forward or the loss depends on the process or the time",
    "loss that refuses several processes": "the run fails on another number of processes",
    "collate that leaves one out": "collate leaves samples out",
    "collate that counts": SEVERAL,
}


NAMES = {
    "generator of the dataset": "dataset.generator (a generator)",
    "items that drift": "dataset.count",
    "running level in training": "model.level",
    "running level in evaluation": "model.level",
    "generator that the model uses rarely": "model.noise (a generator)",
    "generator that the model hardly uses": "draws from model.noise (a generator), though",
    "generator that the model holds": "nothing was seen to draw from model.noise (a generator); ",
    "generator that the dataset hardly uses": "draws from dataset.generator (a generator), ",
    "teacher that follows": "follower.",
    "every seventh forward": "model.count",
    "running level that starts late": "model.count, model.level",
    "every hundredth forward": "model.count",
    "threshold that learns": "model.level",
    "teacher in a list": "model.teachers.0.",
    "buffer that grows in place": "kept_level",
    "level of a function's module": "seen_before.SEEN.level",
    "noise that is kept": "kept_noise.cache",
    "every thousandth sample": "dataset.count",
    "first micro-batch": "model.kept",
    "last micro-batch": "model.kept",
    "running level of evaluations": "model.level",
    "cached augmentation": "dataset.cache.",
    "generator of the eval dataset": "eval_datasets.held_out.generator (a generator)",
    "collate that counts": "task.calls",
}
"""What holds the state, as the evidence says it."""


def one_of_each_twin(names: Iterable[str]) -> list[str]:
    """Of mistakes with the same correct twin, one."""
    return list({TASKS[f"{name} RowTask"].TWIN or name: name for name in names}.values())


def make(name: str, model: str, wrong: bool) -> Planted:
    """Build a task by the name of its mistake; for `class_path`."""
    task: Planted = TASKS[f"{name} {model}"](wrong)
    return task


class Named(Task):
    """Stands in a configuration for a task that has no name."""

    def __new__(cls, name: str, model: str, wrong: bool) -> Any:
        return make(name, model, wrong)

    build_model = train_dataset = forward = loss = None  # type: ignore[assignment]


def config(name: str, model: str, wrong: bool, **sections: Any) -> RunConfig:
    """Return the configuration of a run in four lanes: two full steps and a partial one an epoch."""
    path = partial("{}.{}".format, __name__)
    given = {
        "optimizer": OptimizerConfig(class_path="torch.optim.SGD", init_args={"lr": 0.1}),
        "batch": BatchConfig(global_batch_size=16, micro_batch_size=4),
        **sections,
    }
    return RunConfig(
        task=ClassConfig(class_path=path("Named"), init_args={"name": name, "model": model, "wrong": wrong}),
        train=TrainConfig(epochs=2, run_dir="never-made"),
        distributed=DistributedConfig(device_type="cpu", equality="exact"),
        **given,
    )
