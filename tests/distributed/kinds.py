"""What code of the user's may change behind the trainer's back, a task for each: see test_kinds.py."""

import random
import time
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from lanewise import Loss, Task


class Points(Dataset[Any]):
    """22 points: the last step of an epoch is partial, and has three lanes of four."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


class Net(nn.Module):
    """A student, and a teacher that follows it, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.student(points) + self.teacher(points)


class Plain(Task):
    """Changes nothing."""

    def build_model(self) -> nn.Module:
        return Net()

    def train_dataset(self) -> Dataset[Any]:
        return Points()

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])


# Parameters.


class TeacherInForward(Plain):
    """How MoCo and BYOL are usually written."""

    @torch.no_grad()
    def follow(self, model: Any) -> None:
        for mean, one in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mean.mul_(0.9).add_(one, alpha=0.1)

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        self.follow(model)
        return super().forward(model, batch)


class TeacherThroughData(TeacherInForward):
    """Which moves no version."""

    def follow(self, model: Any) -> None:
        for mean, one in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mean.data.mul_(0.9).add_(one.data, alpha=0.1)


class TeacherReplaced(TeacherInForward):
    def follow(self, model: Any) -> None:
        for mean, one in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mean.data = 0.9 * mean.data + 0.1 * one.data


class TeacherThatIsCopied(TeacherInForward):
    """Equal to its student until the first update, so that the first step shows nothing."""

    def follow(self, model: Any) -> None:
        for mean, one in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mean.data.copy_(one.data)


class TeacherInLoss(TeacherInForward):
    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        self.model = model
        return Plain.forward(self, model, batch)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        self.follow(self.model)
        return super().loss(outputs, batch)


class TeacherInTask(Plain):
    """Not a part of the model, but of the task."""

    def build_model(self) -> nn.Module:
        net = Net()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        return net

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(model.student.weight, 0.1)
        return super().forward(model, batch) + self.teacher(batch[0])


class TeacherInList(TeacherInTask):
    def build_model(self) -> nn.Module:
        net = super().build_model()
        self.teachers = [self.__dict__.pop("teacher")]
        return net

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        (teacher,) = self.teachers
        teacher.weight.data.lerp_(model.student.weight.data, 0.1)
        return Plain.forward(self, model, batch) + teacher(batch[0])


class LimitedNorm(Plain):
    """A max_norm changes the rows that a lane looks up."""

    def build_model(self) -> nn.Module:
        net: Any = Net()
        net.rows = nn.Embedding(3, 3, max_norm=0.5)
        return net

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return super().forward(model, batch) + model.rows(batch[1])


class ClippedInBackward(Plain):
    """WGAN's clipping, at the wrong place."""

    def build_model(self) -> nn.Module:
        net = Net()
        net.student.weight.register_post_accumulate_grad_hook(self.clip)
        return net

    def clip(self, weight: torch.Tensor) -> None:
        weight.data.clamp_(-0.1, 0.1)


class Criterion(Plain):
    """A criterion with weights that lies in the task, as ArcFace's."""

    def build_model(self) -> nn.Module:
        self.criterion = nn.Linear(3, 3)
        return Net()

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return F.cross_entropy(self.criterion(outputs), batch[1])


class Temperature(Plain):
    """A plain tensor that needs a gradient."""

    def build_model(self) -> nn.Module:
        self.temperature = torch.tensor(1.0, requires_grad=True)
        return Net()

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return F.cross_entropy(outputs * self.temperature, batch[1])


class Centred(nn.Module):
    """The loss of DINO, in short: its centre follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs - self.centre, labels)
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return loss


class CentreInTask(Plain):
    """A buffer that no process merges."""

    def __init__(self) -> None:
        self.criterion = Centred()

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return self.criterion(outputs, batch[1])


class TeacherWithStatistics(Plain):
    """One that is left in training mode keeps statistics, which it does not read."""

    def __init__(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return F.mse_loss(outputs, self.teacher(batch[0]))


class OldWeightNorm(Plain):
    """Keeps a weight with a graph between the forwards."""

    def build_model(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.utils.weight_norm(nn.Linear(6, 3))


class FrozenCriterion(Criterion):
    """One that is not trained is right."""

    def build_model(self) -> nn.Module:
        net = super().build_model()
        self.criterion.requires_grad_(False)
        return net


class Forces(Plain):
    """The gradient by an input that the forward makes a leaf, as for forces and gradient penalties."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        points = batch[0].clone().requires_grad_()
        outputs = model(points)
        (forces,) = torch.autograd.grad(outputs.square().sum(), points, create_graph=True)
        return outputs + forces[:, :3]


class ShrinkingOptimizer(torch.optim.SGD):
    """Changes weights that it does not train; it steps alike on every process."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for one in self.param_groups[0]["params"]:
            one.data.mul_(0.9)


# Buffers.


class Statistics(Plain):
    """Float statistics become the mean over the lanes."""

    def build_model(self) -> nn.Module:
        net = Net()
        net.register_buffer("mean", torch.zeros(6))
        return net

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        model.mean.lerp_(batch[0].mean(0), 0.1)
        return super().forward(model, batch)


class StatisticsInLoss(Statistics):
    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        self.model = model
        return Plain.forward(self, model, batch)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        self.model.mean.lerp_(batch[0].mean(0), 0.1)
        return super().loss(outputs, batch)


class LabelCounts(Plain):
    """Integers that differ between lanes have no mean."""

    def build_model(self) -> nn.Module:
        net = Net()
        net.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        return net

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        model.counts += torch.bincount(batch[1], minlength=3)
        return super().forward(model, batch)


# Random numbers.


class _Noise(torch.autograd.Function):
    """A backward that draws."""

    @staticmethod
    def forward(_ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class NoiseInBackward(Plain):
    """As where gradients are made private."""

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return _Noise.apply(super().forward(model, batch))


class NoiseInHook(Plain):
    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        outputs = super().forward(model, batch)
        outputs.register_hook(lambda one: one * float(np.random.rand()) * random.random())  # noqa: NPY002
        return outputs


class ForgetfulCheckpoint(Plain):
    """A block that runs again in the backward with other random numbers."""

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return checkpoint(
            lambda points: F.dropout(model(points), 0.5),
            batch[0],
            use_reentrant=False,
            preserve_rng_state=False,
        )


class CarefulCheckpoint(Plain):
    """A block that runs again in the backward with the same random numbers."""

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return checkpoint(lambda points: F.dropout(model(points), 0.5), batch[0], use_reentrant=False)


class _OfAll(Plain):
    """A loss of all samples, whose lanes' backwards come long after their forwards."""

    loss: Any = Task.loss

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        return F.cross_entropy(outputs, inputs)

    def batch_loss_inputs(self, batch: Any) -> Any:
        return batch[1]


class NoiseInBackwardOfAll(_OfAll):
    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return _Noise.apply(super().forward(model, batch))


class NoiseInBackwardByRows(NoiseInBackwardOfAll):
    batch_loss: Any = Task.batch_loss

    def row_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Any:
        return F.cross_entropy(outputs[rows], inputs[rows])


class NoiseInBackwardOfTerms(NoiseInBackward):
    """Two terms with divisors of their own."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        total = F.cross_entropy(outputs, batch[1], reduction="sum")
        return [Loss(total, len(batch[1])), Loss(outputs.square().sum(), outputs.numel())]

    def loss_weights(self, batch: Any) -> Any:
        return None


# Attributes: of the task, the model, an object that they hold, a module's variables, the dataset.


class CountInTask(Plain):
    """A temperature that anneals with the forwards, which each process counts for itself."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        self.calls += 1
        return super().loss(outputs, batch) * (1 + self.calls / 64)


class CountedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(points) * (1 + self.calls / 64)


class CountInModel(Plain):
    def build_model(self) -> nn.Module:
        return CountedNet()


class CountInHolder(CountInTask):
    """In an object that the task holds, in a dict."""

    def __init__(self) -> None:
        self.held = {"state": SimpleNamespace(calls=0)}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        self.held["state"].calls += 1
        return Plain.loss(self, outputs, batch) * (1 + self.held["state"].calls / 64)


CALLS = [0]


class CountInVariable(Plain):
    """In a variable of the module."""

    def __init__(self) -> None:
        CALLS[0] = 0

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        CALLS[0] += 1
        return super().loss(outputs, batch) * (1 + CALLS[0] / 64)


class CountInBackward(CountInTask):
    """A hook that scales the gradient more with each call."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        outputs.register_hook(self.scale)
        return Plain.loss(self, outputs, batch)

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient * (1 + self.calls / 64)


class LastOutputs(Plain):
    """Compares the outputs with those of the micro-batch before."""

    def __init__(self) -> None:
        self.last = torch.zeros(1, 3)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        last, self.last = self.last, outputs.detach()
        return super().loss(outputs - 0.1 * last.mean(0), batch)


class OwnGenerator(Plain):
    def __init__(self) -> None:
        self.rng = random.Random(7)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return super().loss(outputs, batch) * self.rng.random()


class Harmless(CountInTask):
    """A counter that enters nothing, a memo, what each forward sets anew, and a log."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor | None = None
        self.outputs, self.log = torch.zeros(0), []

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        self.calls += 1
        if self.scale is None:
            self.scale = torch.full((3,), 0.5)
        self.outputs = outputs = outputs * self.scale.to(outputs.device)
        self.log.append(len(outputs))
        return Plain.loss(self, outputs, batch)


class CountInUpdate(Plain):
    """A teacher that warms up, as in timm's and YOLO's averages."""

    def build_model(self) -> nn.Module:
        net: Any = Net()
        net.updates = 0
        return net

    def after_update(self, model: Any, step: Any) -> None:
        model.updates += 1
        for mean, one in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mean.lerp_(one, 1 / (1 + model.updates))


class TeacherOfUpdate(TeacherInTask):
    """No part of the model, so that no checkpoint has it."""

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return Plain.forward(self, model, batch) + self.teacher(batch[0])

    def after_update(self, model: Any, step: Any) -> None:
        self.teacher.weight.lerp_(model.student.weight, 0.1)


class AnnealedDropout(Plain):
    """In an attribute of a module of torch, which a resumed run builds as it was at the beginning."""

    def build_model(self) -> nn.Module:
        net: Any = Net()
        net.student = nn.Sequential(nn.Dropout(0.1), nn.Linear(6, 3))
        return net

    def after_update(self, model: Any, step: Any) -> None:
        model.student[0].p = 0.05 * step.progress.number


class SmoothedLabels(Plain):
    """In an attribute of a criterion of torch."""

    def __init__(self) -> None:
        self.criterion = nn.CrossEntropyLoss()

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return self.criterion(outputs, batch[1])

    def after_update(self, model: Any, step: Any) -> None:
        self.criterion.label_smoothing += 0.01


class HarmlessUpdate(Plain):
    """Counts what nothing reads."""

    def __init__(self) -> None:
        self.updates = 0

    def after_update(self, model: Any, step: Any) -> None:
        self.updates += 1


class Meter:
    """An average for the log, which begins anew now and then."""

    def __init__(self) -> None:
        self.sum, self.count, self.best = 0.0, 0, float("inf")

    def update(self, value: float) -> None:
        self.sum, self.count, self.best = self.sum + value, self.count + 1, min(self.best, value)


class LoggingUpdate(Plain):
    """Reads what it keeps, for a log alone: averages, the best loss, the time, and norms of weights."""

    def __init__(self) -> None:
        self.meter, self.start, self.decay, self.rows = Meter(), time.perf_counter(), 0.9, [[0.0]]

    def after_update(self, model: Any, step: Any) -> None:
        self.meter.update(step.loss)
        self.decay = 1 - 1 / (2 + step.progress.number)
        with torch.no_grad():
            model.teacher.weight.lerp_(model.student.weight, 1 - self.decay)
        if step.loss < self.meter.best or self.meter.count > 2:
            self.meter = Meter()
        self.rows.append(
            [self.meter.sum, model.student.weight.norm().item(), time.perf_counter() - self.start]
        )
        self.start = time.perf_counter()


class PatienceOfUpdate(Plain):
    """Shrinks weights where the loss is no better than the best one, which no checkpoint has."""

    def __init__(self) -> None:
        self.best, self.patience = float("inf"), 0

    def after_update(self, model: Any, step: Any) -> None:
        self.patience = 0 if step.loss < self.best else self.patience + 1
        self.best = min(self.best, step.loss)
        model.student.weight.mul_(1 - 0.1 * min(self.patience, 1))


class CountingPoints(Points):
    """Counts its reads, which loader processes do apart from each other: verify reads twice."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index)


class CountInDataset(Plain):
    def train_dataset(self) -> Dataset[Any]:
        self.points = CountingPoints()
        return self.points


class WritesLate(Plain):
    """Lanes that write a buffer of the whole step, but not in the first steps."""

    step_state = ("level",)

    def build_model(self) -> nn.Module:
        net: Any = Net()
        net.register_buffer("level", torch.zeros(3))
        return net

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        outputs = super().forward(model, batch)
        if self.progress.number >= 3:
            model.level.lerp_(outputs.detach().mean(0), 0.1)
        return outputs + model.level


class LateCount(CountInTask):
    """A counter that begins to count after the first steps."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        self.calls += self.progress.number >= 3
        return Plain.loss(self, outputs, batch) * (1 + self.calls / 64)


class LateCountInUpdate(HarmlessUpdate):
    def after_update(self, model: Any, step: Any) -> None:
        self.updates += step.progress.number >= 3
        model.teacher.weight.mul_(1 - 0.1 * self.updates)


class FrozenTeacher(Plain):
    """In evaluation mode from `build_model` on, so that its statistics stay."""

    def build_model(self) -> nn.Module:
        net: Any = Net()
        net.teacher = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False).eval()
        return net


# Losses of all samples.


class TemperatureOfAll(_OfAll):
    """A learned temperature of a loss of all samples, which is computed once in a step."""

    def build_model(self) -> nn.Module:
        self.temperature = torch.tensor(1.0, requires_grad=True)
        return Net()

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        return F.cross_entropy(outputs * self.temperature, inputs)


class QueueInLoss(_OfAll):
    """Keeps the outputs of earlier steps; also where a process has no samples, it must be the same."""

    def build_model(self) -> nn.Module:
        self.queue = torch.zeros(0, 3)
        return super().build_model()

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        everything = torch.cat([outputs, self.queue])
        self.queue = everything.detach()[:40]
        return F.cross_entropy(outputs @ everything.T, inputs)


class QueueByRows(QueueInLoss):
    """A loss by rows is computed for the lanes of a process alone."""

    batch_loss: Any = Task.batch_loss

    def row_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Any:
        self.queue = torch.cat([outputs.detach(), self.queue])[:40]
        return F.cross_entropy(outputs[rows] @ self.queue.T, inputs[rows])


class CentreOfWholeStep(_OfAll):
    """Every process gives it the outputs of all lanes, once in each step."""

    def __init__(self) -> None:
        self.criterion = Centred()

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        return self.criterion(outputs, inputs)


class ChannelsLast(_OfAll):
    """Outputs whose strides an exchange does not keep."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 1), nn.Upsample(scale_factor=5))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).contiguous(memory_format=torch.channels_last)

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        factors = torch.linspace(0.1, 3, outputs[0].numel()).view_as(outputs[0])
        return (outputs * factors.to(outputs.device)).tanh().mean()
