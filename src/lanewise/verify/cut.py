"""Whether the gradient depends on how samples are cut into micro-batches, and whether metrics merge."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lanewise.checkpoint.encode import real_view
from lanewise.data import LaneReader, digest
from lanewise.engine import read_in_order
from lanewise.errors import TaskError
from lanewise.lanes import SequentialSchedule, evaluation_seed
from lanewise.metrics import MetricStates, merge_metrics, named_values, take_states
from lanewise.random_state import set_random_state
from lanewise.verify.subject import Subject
from lanewise.world.world import LocalWorld

_MAX_SAMPLES = 16
_METRIC_TOLERANCE = 1e-4
_SMALL = 0.05
_MAX_ELEMENTS = 2**20


@dataclass(frozen=True)
class Cut:
    """What another cut of the same samples does to the gradient."""

    difference: float
    """Norm of the difference of the two mean gradients, by the norm that rounding is proportional to."""
    tolerance: float
    residual: float
    """The part of it that no other weights of the samples explain."""
    num_samples: int

    @property
    def is_same(self) -> bool:
        """Whether the gradient is the mean over the samples, however they are cut."""
        return self.difference <= self.tolerance

    @property
    def is_weighting(self) -> bool:
        """Whether the gradient is a mean over the samples with weights that depend on the cut."""
        return not self.is_same and self.residual <= _SMALL * self.difference


@dataclass(frozen=True)
class CutProbe:
    """What was found, or why nothing could be."""

    in_evaluation_mode: Cut | None
    with_statistics: Cut | None
    """With the modules in training mode that own buffers which a forward changes; None if there are none."""
    owners: str = ""
    """Names of those modules."""
    why_not: str = ""


def probe_cut(subject: Subject, changed_buffers: Sequence[str]) -> CutProbe:
    """Compute the gradient of the same samples as one micro-batch and as micro-batches of one sample each.

    No micro-batch is larger than those that training has: a collate may rely on that. In evaluation mode, so
    that dropout and statistics of the micro-batch stay out of it.

    Args:
        subject: newly built.
        changed_buffers: names of buffers that a forward changes in training mode.
    """
    try:
        return _probe_cut(subject, changed_buffers)
    except Exception as error:  # noqa: BLE001 - training never asks for a loss in evaluation mode
        return CutProbe(None, None, why_not=f"the loss of other micro-batches failed: {error!r:.200}")


def _probe_cut(subject: Subject, changed_buffers: Sequence[str]) -> CutProbe:
    indices = subject.indices_of(subject.turn)[:_MAX_SAMPLES]
    if len(indices) < 2:
        return CutProbe(None, None, why_not="a micro-batch is a single sample")
    samples = subject.reader.read(0, indices)
    if len({digest(subject.collate(samples, seed)) for seed in (0, 1)}) > 1:
        why_not = "collate draws random numbers, which would be others for another cut"
        return CutProbe(None, None, why_not=why_not)
    subject.model.eval()
    if len({_loss_of(subject, samples, seed) for seed in (0, 1)}) > 1:
        return CutProbe(None, None, why_not="the forward draws random numbers in evaluation mode as well")
    in_evaluation_mode = _compare_cuts(subject, samples, 1)
    with_statistics = None
    owners = sorted({name.rpartition(".")[0] for name in changed_buffers})
    if owners:
        for owner in owners:
            subject.model.get_submodule(owner).training = True
        with suppress(ValueError):  # of a part of one sample, which has no statistics
            with_statistics = _compare_cuts(subject, samples, (len(samples) + 1) // 2)
        subject.model.eval()
    return CutProbe(in_evaluation_mode, with_statistics, ", ".join(filter(None, owners[:3])) or "the model")


def _loss_of(subject: Subject, samples: Sequence[Any], seed: int) -> str:
    data = subject.to_device(subject.collate(samples, 0))
    set_random_state(seed)
    with torch.no_grad():
        loss = subject.loss(data, len(samples))
    return digest(loss.sum, loss.weight)


def _compare_cuts(subject: Subject, samples: Sequence[Any], size: int) -> Cut:
    """Compare the mean gradient of all samples with that of parts of some size."""
    whole, whole_weight = _gradient(subject, samples)
    parts = [_gradient(subject, samples[start : start + size]) for start in range(0, len(samples), size)]
    parts = [part for part in parts if part[1] > 0]
    weight = sum(part_weight for _, part_weight in parts)
    types = {one.dtype for one in subject.model.parameters() if one.is_floating_point() or one.is_complex()}
    tolerance = math.sqrt(max(torch.finfo(dtype).eps for dtype in types))
    if not whole_weight or not weight:
        return Cut(0.0, tolerance, 0.0, len(samples))
    target = whole / whole_weight
    mean = sum(gradient for gradient, _ in parts) / weight
    # Each part's own mean gradient; a mean of them under other weights lies in their span.
    columns = torch.stack([gradient / part_weight for gradient, part_weight in parts], dim=1)
    if not (target.isfinite().all() and columns.isfinite().all()):
        raise TaskError("a gradient is not finite")
    size_of_rounding = max(float(columns.norm(dim=0).max()), 1e-300)
    difference = float((target - mean).norm()) / size_of_rounding
    residual = 0.0
    if difference > tolerance:
        weights = torch.linalg.lstsq(columns, target.unsqueeze(1), driver="gelsd").solution
        residual = float((columns @ weights - target.unsqueeze(1)).norm()) / size_of_rounding
        if len(target) < 2 * len(parts):  # too few elements to tell: any target is in their span
            residual = difference
    return Cut(difference, tolerance, residual, len(samples))


def _gradient(subject: Subject, samples: Sequence[Any]) -> tuple[torch.Tensor, float]:
    """Return elements of the gradient of the loss sum, in float64 on the CPU, and the weight.

    Of large models about a million elements, some of every parameter.
    """
    data = subject.to_device(subject.collate(samples, 0))
    set_random_state(0)
    with subject.kept_state():
        loss, gradients = subject.gradients(data, len(samples))
    step = -(-sum(one.numel() for one in gradients.values()) // _MAX_ELEMENTS)
    flat = [(real_view(one) if one.is_complex() else one).reshape(-1) for one in gradients.values()]
    return torch.cat([one[::step].cpu().double() for one in flat]), loss.weight


@dataclass(frozen=True)
class UnmergedMetric:
    """A metric whose merged copies give another value than one copy that saw everything."""

    name: str
    whole: float
    merged: float


def probe_metrics(subject: Subject, micro_batch_size: int, max_samples: int) -> list[UnmergedMetric]:
    """Let one copy of each metric see everything, and two copies very unequal parts; compare."""
    task, model, world = subject.task, subject.model, LocalWorld(subject.device)
    model.eval()
    found = []
    for set_name, dataset in task.eval_datasets().items():
        num_samples = min(len(dataset), max_samples)  # type: ignore[arg-type]
        reader = LaneReader(dataset, task.collate, subject.seed, eval_dataset=set_name)
        schedule = SequentialSchedule(num_samples, 1, min(micro_batch_size, max(1, num_samples // 3)))
        whole, first, rest = (
            {name: one.to(subject.device) for name, one in task.build_metrics().items()} for _ in range(3)
        )
        for number, batch in enumerate(read_in_order(reader, schedule, world, num_workers=0)):
            set_random_state(evaluation_seed(subject.seed, batch.turn.step, batch.turn.lane))
            with torch.no_grad(), subject.precision.forward():
                outputs = task.forward(model, batch.data)
                for metrics in (whole, rest if number else first):
                    task.update_metrics(metrics, outputs, batch.data)
        lanes: list[MetricStates] = [take_states(first), take_states(rest)]
        merged = merge_metrics(task.build_metrics(), [lane for lane in lanes if _is_updated(lane)])
        for name, value in named_values(whole).items():
            if not _is_near(value, merged.get(name, math.nan)):
                found.append(UnmergedMetric(f"{set_name}/{name}", value, merged.get(name, math.nan)))
    return found


def _is_updated(lane: MetricStates) -> bool:
    return any(count for count, _ in lane.values())


def _is_near(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=_METRIC_TOLERANCE, abs_tol=1e-6)
