"""Where samples of a micro-batch meet: in the forward, in the comparisons of a loss, or in neither.

What `Task.forward` returns is looked at, and the loss as a function of it, under weights other than those of
the start, which may be zeros. A forward in which samples don't meet gives each the outputs that it has alone.
A loss in which they don't meet pulls at the outputs of one sample alike whatever the others' outputs are, or
harder at all of them, as the root of a mean does.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lanewise.random_state import set_random_state
from lanewise.verify.probed_run import ProbedRun

Meeting = Literal["forward", "loss", "factor", "neither", "unknown"]

_SCALES = (1.0, 4.0)
"""Of the weights: small outputs and large ones, as a loss may be linear in some of them."""
_TOLERANCE = 1e-3


def where_samples_meet(probed: ProbedRun, samples: Sequence[Any]) -> Meeting:
    """Tell where the samples of a micro-batch meet. The model must be in evaluation mode.

    `factor` where the outputs of the others change the gradient for a sample's by a factor that is the same
    for all samples. `unknown` where it cannot be told: outputs whose rows are not those of samples, as the
    loss that a model returns by itself, or a loss that reaches the weights by another way than the outputs.
    """
    try:
        found = {_meeting(probed, samples, scale) for scale in _SCALES}
    except Exception:  # noqa: BLE001 - a loss need not take outputs of mixed weights
        return "unknown"
    order: tuple[Meeting, ...] = ("unknown", "forward", "loss", "factor", "neither")
    return next(one for one in order if one in found)


def _meeting(probed: ProbedRun, samples: Sequence[Any], scale: float) -> Meeting:
    data = probed.to_device(probed.collate(samples, 0))
    with probed.other_weights(1, scale):
        parts = [_outputs(probed, probed.to_device(probed.collate([one], 0)))[0] for one in samples]
        mine, tree = _outputs(probed, data)
    with probed.other_weights(2, scale):
        others, _ = _outputs(probed, data)
    if not all(len(part) == len(mine) for part in parts):
        return "unknown"
    owners = [_owners(whole, of_parts) for whole, *of_parts in zip(mine, *parts, strict=True)]
    for whole, owner, *of_parts in zip(mine, owners, *parts, strict=True):
        if owner is not None and whole.is_floating_point():
            for number, part in enumerate(of_parts):
                if not _agree(whole[owner == number], part):
                    return "forward"
    pulls = _pulls(probed, mine, tree, data, len(samples))
    if any(owner is None and pull.any() for owner, pull in zip(owners, pulls, strict=True)):
        return "unknown"
    if not any(pull.any() for pull in pulls):
        return "unknown"
    found: Meeting = "neither"
    for first in (0, 1):
        kept = [None if owner is None else owner % 2 == first for owner in owners]
        mixed = [_mix(*leaves) for leaves in zip(kept, mine, others, strict=True)]
        now = _pulls(probed, mixed, tree, data, len(samples))
        of_kept = [
            (one[rows].flatten(), other[rows].flatten())
            for rows, one, other in zip(kept, pulls, now, strict=True)
            if rows is not None
        ]
        before, after = (torch.cat([pair[number].double() for pair in of_kept]) for number in (0, 1))
        if not _agree(after, before):
            factor = (after @ before) / (before @ before).clamp_min(1e-300)
            if not _agree(after, factor * before):
                return "loss"
            found = "factor"
    return found


def _outputs(probed: ProbedRun, data: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of what the forward gives, with their graph; each is a tensor."""
    outputs = probed.lane_of(data, 1).forward(probed.model, copy.deepcopy(data))
    leaves, tree = tree_flatten(outputs)
    return [torch.as_tensor(leaf) for leaf in leaves], tree


def _owners(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the number of the sample to which each row belongs; None where rows are not those of samples."""
    if not whole.dim() or any(part.dim() != whole.dim() for part in parts):
        return None
    sizes = torch.tensor([len(part) for part in parts], device=whole.device)
    if int(sizes.sum()) != len(whole):
        return None
    return torch.arange(len(parts), device=whole.device).repeat_interleave(sizes)


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether what both have is the same: one may be padded."""
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    one, other = one.detach()[common], other.detach()[common]
    if not one.numel():
        return True
    size = float(other.abs().max())
    return bool((one - other).abs().max() <= _TOLERANCE * size)


def _pulls(
    probed: ProbedRun, leaves: Sequence[torch.Tensor], tree: TreeSpec, data: Any, num_samples: int
) -> list[torch.Tensor]:
    """Return the gradient of the loss sum for each leaf.

    Raises:
        ValueError: if the loss has a gradient for the weights besides.
    """
    given = [leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
    # A loss may change what it gets, which a leaf of the graph does not allow.
    outputs = tree_unflatten([leaf * 1 if leaf.requires_grad else leaf for leaf in given], tree)
    lane = probed.lane_of(data, num_samples)
    set_random_state(0)
    loss = lane.check(lane.loss(outputs, copy.deepcopy(data))).sum
    trained = [leaf for leaf in given if leaf.requires_grad]
    weights = [one for one in probed.model.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(loss, [*trained, *weights], allow_unused=True)  # type: ignore[arg-type]
    if any(gradient is not None for gradient in gradients[len(trained) :]):
        raise ValueError("the loss reaches the weights by another way than the outputs")
    found = iter(gradients)
    pulls = [next(found) if leaf.requires_grad else None for leaf in given]
    return [torch.zeros_like(leaf) if pull is None else pull for leaf, pull in zip(given, pulls, strict=True)]


def _mix(kept: torch.Tensor | None, mine: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return kept rows of mine, and the rest of others."""
    if kept is None:
        return mine
    return torch.where(kept.reshape(-1, *[1] * (mine.dim() - 1)), mine, others)
