"""Whether the gradient depends on how samples are cut into micro-batches, and in what way."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

import torch

from lanewise.commands.verify.interaction import where_samples_interact
from lanewise.commands.verify.probed_run import ProbedRun
from lanewise.commands.verify.time_limit import in_time
from lanewise.data import digest
from lanewise.errors import TaskError
from lanewise.processes.world.encode import real_view

_MAX_SAMPLES = 16
_NUM_MICRO_BATCHES = 32
_SMALL = 0.05
_MAX_ELEMENTS = 2**20
_DRAWS = "draws random numbers"

Influence = Literal["", "weights", "term", "targets", "forward", "loss", "unknown"]
"""How the micro-batch influences the gradient: it changes the weights of the samples, adds a term once for
each micro-batch, or changes weights or targets of single terms; or its samples interact in the forward or in
the loss. Empty where it has no influence."""


@dataclass(frozen=True)
class CutProbe:
    """How the gradient of the same samples differs when they are cut into other micro-batches."""

    influence: Influence = ""
    """How the micro-batch influences the gradient in evaluation mode."""
    difference: float = 0.0
    """Norm of the difference of the two mean gradients, divided by the largest norm of any."""
    num_samples: int = 0
    part_size: int = 1
    """How many samples each part had."""
    statistics_of: str = ""
    """Names of modules whose statistics of a micro-batch, in training mode, change the gradient."""
    why_not: str = ""
    """Why nothing could be found."""
    cut_short: Sequence[str] = ()
    """What took so long that it was looked at less often."""


def probe_cut(probed: ProbedRun, changed_buffers: Sequence[str]) -> CutProbe:
    """Compute the gradient of the same samples as one micro-batch and as micro-batches of one sample each.

    No micro-batch is larger than those that training has: a collate may rely on that. In evaluation mode, so
    that dropout and statistics of the micro-batch stay out of it.

    Args:
        probed: newly built.
        changed_buffers: names of buffers that a forward changes in training mode.
    """
    if probed.lanes.loss_method != "loss":  # which is of all samples of a step, however they are cut
        return CutProbe()
    try:
        return _probe_cut(probed, changed_buffers)
    except Exception as error:  # noqa: BLE001 - training never asks for a loss in evaluation mode
        return CutProbe(why_not=f"in evaluation mode the loss of other micro-batches failed: {error!r:.200}")


def _probe_cut(probed: ProbedRun, changed_buffers: Sequence[str]) -> CutProbe:
    micro_batches = _micro_batches(probed)
    samples = next(micro_batches)
    if len(samples) < 2:
        return CutProbe(why_not="a micro-batch is a single sample")
    if why := _why_unequal(lambda seed: digest(probed.collate(samples, seed))):
        return CutProbe(why_not=f"collate makes another micro-batch of equal samples, as it {why}")
    probed.model.eval()
    if why := _why_unequal(lambda seed: _loss_of(probed, samples, seed)):
        remedy = (
            ". Draw in training only (if self.training), or verify a copy of the task that does; a loss that "
            "has to draw, as that of a diffusion model, cannot be tested so"
        )
        remedy = remedy if why == _DRAWS else ""
        return CutProbe(why_not=f"in evaluation mode the loss of equal samples changes, as it {why}{remedy}")
    cut_short: list[str] = []
    several = islice(chain([samples], micro_batches), _NUM_MICRO_BATCHES)
    for others in in_time(several, cut_short, "micro-batches that are cut into samples"):
        found = replace(_compare_cuts(probed, others, 1), cut_short=cut_short)
        if found.influence:  # samples of one class may show none
            break
    owners = sorted({name.rpartition(".")[0] for name in changed_buffers})
    if owners:
        for owner in owners:
            probed.model.get_submodule(owner).training = True
        with suppress(ValueError, TaskError):  # of a part of one sample, which has no statistics
            if _compare_cuts(probed, samples, (len(samples) + 1) // 2, says_how=False).influence:
                found = replace(found, statistics_of=", ".join(filter(None, owners[:3])) or "the model")
        probed.model.eval()
    return found


def _why_unequal(run: Callable[[int], str]) -> str:
    """Say why the digest of a run is not always the same; empty where it is.

    Args:
        run: takes the seed of its random numbers.
    """
    first, again, of_other_seed = (run(seed) for seed in (0, 0, 1))
    if first != again:
        return "keeps state or depends on something outside"
    return _DRAWS if first != of_other_seed else ""


def _micro_batches(probed: ProbedRun) -> Iterator[Sequence[Any]]:
    """Yield the samples of the first lane's micro-batch, then as many samples taken from all lanes."""
    own = probed.indices_of(probed.turn)[:_MAX_SAMPLES]
    yield probed.reader.read(0, own)
    stride = len(probed.indices) // len(own)
    others = (probed.reader.read(0, probed.indices[start::stride][: len(own)]) for start in range(stride))
    yield from filter(len, others)


def _loss_of(probed: ProbedRun, samples: Sequence[Any], seed: int) -> str:
    with probed.kept_state(), torch.no_grad():
        loss = probed.lane_of(samples, seed).run(probed.model)
    return digest(loss.sum, loss.weight)


def _compare_cuts(probed: ProbedRun, samples: Sequence[Any], size: int, *, says_how: bool = True) -> CutProbe:
    """Compare the mean gradient of all samples with that of parts of some size.

    Where a single sample has no gradient, as with a loss that takes a standard deviation or a mean over some
    of the targets, two parts of two samples are compared with all four.
    """
    found = CutProbe(num_samples=len(samples), part_size=size)
    whole, whole_weight = _gradient(probed, samples)
    parts = [_gradient(probed, samples[start : start + size]) for start in range(0, len(samples), size)]
    weight = sum(part_weight for _, part_weight in parts)
    types = {
        tensor.dtype
        for tensor in probed.model.parameters()
        if tensor.is_floating_point() or tensor.is_complex()
    }
    tolerance = math.sqrt(max(torch.finfo(dtype).eps for dtype in types))
    if not whole_weight or not weight:
        return found
    target = whole / whole_weight
    mean = sum(gradient for gradient, _ in parts) / weight
    # Each column is the mean gradient of a part. A mean under other weights lies in their span.
    columns = torch.stack([gradient / (part_weight or 1.0) for gradient, part_weight in parts], dim=1)
    if not (target.isfinite().all() and columns.isfinite().all()):
        if says_how and size == 1 and len(samples) >= 4:
            return _compare_cuts(probed, samples[:4], 2)
        raise TaskError("a gradient is not finite")
    size_of_rounding = max(float(columns.norm(dim=0).max()), float(target.norm()), 1e-300)
    difference = float((target - mean).norm()) / size_of_rounding
    if difference <= tolerance:
        return found
    found = replace(found, difference=difference, influence="unknown")
    if not says_how:
        return found
    if _has_term(probed):
        return replace(found, influence="term")
    interaction = where_samples_interact(probed, samples)
    weights = torch.linalg.lstsq(columns, target.unsqueeze(1), driver="gelsd").solution
    residual = float((columns @ weights - target.unsqueeze(1)).norm()) / size_of_rounding
    # With too few elements any target lies in the span, so nothing can be concluded.
    is_weighting = residual <= _SMALL * difference and len(target) >= 2 * len(parts)
    if interaction == "factor" or (is_weighting and interaction != "loss"):
        return replace(found, influence="weights")
    return replace(found, influence="targets" if interaction == "neither" else interaction)


def _has_term(probed: ProbedRun) -> bool:
    """Tell whether the loss sum has a term that is the same for every micro-batch, as a penalty has."""
    samples = probed.reader.read(0, probed.indices[:4])
    if len(samples) < 4:
        return False
    of_parts = [_gradient(probed, samples[number : number + 1])[0] for number in range(4)]
    of_pairs = [_gradient(probed, samples[start : start + 2])[0] for start in (0, 2)]
    # Two parts have the term twice, and their pair has it once.
    term, again = of_parts[0] + of_parts[1] - of_pairs[0], of_parts[2] + of_parts[3] - of_pairs[1]
    return float((term - again).norm()) < _SMALL * float(term.norm())


def _gradient(probed: ProbedRun, samples: Sequence[Any]) -> tuple[torch.Tensor, float]:
    """Return elements of the gradient of the loss sum, in float64 on the CPU, and the weight.

    From large models it takes about a million elements, some of every parameter.
    """
    with probed.kept_state():
        loss, gradients = probed.gradients(probed.lane_of(samples))
    step = -(-sum(part.numel() for part in gradients.values()) // _MAX_ELEMENTS)
    flat = [(real_view(part) if part.is_complex() else part).reshape(-1) for part in gradients.values()]
    return torch.cat([elements[::step].cpu().double() for elements in flat]), loss.weight
