"""Tells where the samples of a micro-batch interact: in the forward, in the loss, or in neither.

If samples do not interact in the forward, each has the outputs that it has alone. If they do not interact in
the loss, its gradient for the outputs of one sample does not depend on the outputs of the others; at most all
gradients change by one factor, as those of the root of a mean do. Both are tested on what `Task.forward`
returns, under other weights than those of the start, which may be zeros.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lanewise.commands.verify.probed_run import ProbedRun
from lanewise.engine.step.lanes import TaskLane
from lanewise.processes.device.random_state import set_random_state

Interaction = Literal["unknown", "forward", "loss", "factor", "neither"]
"""Where samples interact; of several findings, the first one in this order counts."""

_SCALES = (1.0, 4.0)
"""Factors of the weights, for small and for large outputs: a loss may be linear in one of the two ranges."""
_TOLERANCE = 1e-3


def where_samples_interact(probed: ProbedRun, samples: Sequence[Any]) -> Interaction:
    """Tell where the samples of a micro-batch interact. The model must be in evaluation mode.

    Returns `factor` where the outputs of the others change the gradient for a sample's outputs by a factor
    that is the same for all samples. Returns `unknown` where the rows of the outputs are not those of the
    samples, as in a model that returns its loss, or where the loss uses the weights besides the outputs.
    """
    try:
        found = {_interaction(probed, samples, scale) for scale in _SCALES}
    except Exception:  # noqa: BLE001 - a loss need not take outputs of mixed weights
        return "unknown"
    return min(found, key=get_args(Interaction).index)


def _interaction(probed: ProbedRun, samples: Sequence[Any], scale: float) -> Interaction:
    lane = probed.lane_of(samples)
    with probed.other_weights(1, scale):
        parts = [_outputs(probed, probed.lane_of([sample]))[0] for sample in samples]
        mine, tree = _outputs(probed, lane)
    with probed.other_weights(2, scale):
        others, _ = _outputs(probed, lane)
    if not all(len(part) == len(mine) for part in parts):
        return "unknown"
    owners = [_owners(whole, of_parts) for whole, *of_parts in zip(mine, *parts, strict=True)]
    for whole, owner, *of_parts in zip(mine, owners, *parts, strict=True):
        if owner is not None and whole.is_floating_point():
            for number, part in enumerate(of_parts):
                if not _agree(whole[owner == number], part):
                    return "forward"
    pulls = _pulls(probed, mine, tree, lane)
    owners_of_pulled = [owner for owner, pull in zip(owners, pulls, strict=True) if pull.any()]
    if not owners_of_pulled or any(owner is None for owner in owners_of_pulled):
        return "unknown"
    found: Interaction = "neither"
    for first in (0, 1):
        kept = [None if owner is None else owner % 2 == first for owner in owners]
        mixed = [_mix(*leaves) for leaves in zip(kept, mine, others, strict=True)]
        before, after = _rows(pulls, kept), _rows(_pulls(probed, mixed, tree, lane), kept)
        if not _agree(after, before):
            factor = (after @ before) / (before @ before).clamp_min(1e-300)
            if not _agree(after, factor * before):
                return "loss"
            found = "factor"
    return found


def _outputs(probed: ProbedRun, lane: TaskLane) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of what the forward gives, with their graph; each is a tensor."""
    leaves, tree = tree_flatten(lane.forward(probed.model, copy.deepcopy(lane.batch.data)))
    return [torch.as_tensor(leaf) for leaf in leaves], tree


def _owners(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the number of the sample to which each row belongs; None where rows are not those of samples."""
    if not whole.dim() or any(part.dim() != whole.dim() for part in parts):
        return None
    sizes = torch.tensor([len(part) for part in parts], device=whole.device)
    if int(sizes.sum()) != len(whole):
        return None
    return torch.arange(len(parts), device=whole.device).repeat_interleave(sizes)


def _agree(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether the elements that both have are the same; one of them may be padded."""
    common = tuple(slice(min(sizes)) for sizes in zip(mine.shape, other.shape, strict=True))
    mine, other = mine.detach()[common], other.detach()[common]
    if not mine.numel():
        return True
    return bool((mine - other).abs().max() <= _TOLERANCE * other.abs().max())


def _pulls(
    probed: ProbedRun, leaves: Sequence[torch.Tensor], tree: TreeSpec, lane: TaskLane
) -> list[torch.Tensor]:
    """Return the gradient of the loss sum for each leaf.

    Raises:
        ValueError: if the loss has a gradient for the weights besides.
    """
    given = [leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
    # A loss may change what it gets, which a leaf of the graph does not allow.
    outputs = tree_unflatten([leaf * 1 if leaf.requires_grad else leaf for leaf in given], tree)
    set_random_state(0)
    loss = lane.check(lane.loss(outputs, copy.deepcopy(lane.batch.data))).sum
    trained = [leaf for leaf in given if leaf.requires_grad]
    weights = [weight for weight in probed.model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, [*trained, *weights], materialize_grads=True)  # type: ignore[arg-type]
    if any(gradient.any() for gradient in gradients[len(trained) :]):
        raise ValueError("the loss uses the weights besides the outputs")
    found = iter(gradients)
    return [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in given]


def _rows(tensors: Sequence[torch.Tensor], kept: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the elements of the kept rows of all tensors."""
    pairs = zip(tensors, kept, strict=True)
    return torch.cat([tensor[rows].flatten().double() for tensor, rows in pairs if rows is not None])


def _mix(kept: torch.Tensor | None, mine: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return `mine` with the rows that are not kept replaced by those of `others`."""
    if kept is None:
        return mine
    return torch.where(kept.reshape(-1, *[1] * (mine.dim() - 1)), mine, others)
