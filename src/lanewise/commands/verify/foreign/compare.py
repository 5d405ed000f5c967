"""Compares the gradients of several processes with that of one process which read the same samples.

gradient      what an optimizer gets, before clipping; of several processes: reduced
own           what a backward of a rank computed, before anything was reduced
factor        c, for which c times the gradient of one process comes nearest to that of several
residual      what remains then, as a share of the gradient
shares        w, for which the sum of w[rank] times own[rank] comes nearest to the gradient of one process
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.foreign.program import Noted

_Gradients = Mapping[str, torch.Tensor]

_CLOSE = 1e-3
"""A difference, as a share, that is taken for rounding in float32."""
_CLOSE_IN_HALF = 3e-2
_NEGLIGIBLE = 1e-2
"""A parameter's gradient is judged as if it were at least this part of the whole one."""
_MOST_NAMED = 4
_DIVIDE = (
    "Divide the sum of the losses by what all processes count, and multiply it by the number of processes."
)


class CannotTellError(Exception):
    """Says why programs cannot be compared."""


def write_replay(ranks: Sequence[Noted], file: Path) -> None:
    """Write what all ranks read together, and the weights after each update, for one process to do likewise.

    Raises:
        CannotTellError: the samples are not known.
    """
    passes = [[held for held in noted["passes"] if held["is_training"]] for noted in ranks]
    if not all(passes):
        raise CannotTellError("no loader of torch gave out what was trained on, so the samples are not known")
    if any(held["is_stream"] for of_rank in passes for held in of_rank):
        raise CannotTellError("the samples of a stream, or of a loader without batches, have no indices")
    is_by_content = any(of_rank[0]["dataset"] != passes[0][0]["dataset"] for of_rank in passes)
    key = "digests" if is_by_content else "samples"
    if any(len(held[key]) < len(held["samples"]) for of_rank in passes for held in of_rank):
        raise CannotTellError(
            "ranks have other datasets, and read too many samples to compare what is in them"
        )
    numbers = [number for number, held in enumerate(ranks[0]["passes"]) if held["is_training"]]
    batches = {
        number: [
            [sample for batch in together if batch is not None for sample in batch]
            for together in zip_longest(*(of_rank[turn][key] for of_rank in passes if turn < len(of_rank)))
        ]
        for turn, number in enumerate(numbers)
    }
    weights = [update["updated"] for update in ranks[0]["updates"] if "updated" in update]
    torch.save(
        {"passes": batches, "weights": weights, "world_size": len(ranks), "is_by_content": is_by_content},
        file,
    )


@dataclass(frozen=True)
class Comparison:
    """How an update of several processes compares with that of one."""

    number: int
    factor: float
    """The number by which the gradient of one process comes nearest to it."""
    residual: float
    """The share of it that remains then."""
    shares: Sequence[float]
    """The share that the own gradient of each rank has in that of one process."""
    shares_residual: float
    reduced: Sequence[float]
    """The share that the own gradient of each rank has in what rank 0's optimizer got."""
    is_reduced: bool
    """Whether all ranks got the same gradient."""
    is_right: bool
    apart: Sequence[str]
    """Names of parameters that differ more than rounding does."""
    counts: Mapping[str, Sequence[int]]
    """What each rank counted in its batches, by what was counted."""


def compare_update(ranks: Sequence[Noted], single: Noted, number: int) -> Comparison:
    """Compare an update.

    Raises:
        CannotTellError: there is no gradient to compare.
    """
    updates = [noted["updates"][number] for noted in ranks]
    reference = single["updates"][number]
    several: list[_Gradients] = [update["gradients"] for update in updates]
    names = {**updates[0]["names"], **reference["names"]}
    like = {**several[0], **reference["gradients"]}
    own = torch.stack([_flat(_filled(update["own"], like)) for update in updates])
    of_several, *others = (_filled(gradients, like) for gradients in several)
    of_one = _filled(reference["gradients"], like)
    whole, of_single = _flat(of_several), _flat(of_one)
    if not (of_single.any() and whole.any() and whole.isfinite().all() and of_single.isfinite().all()):
        raise CannotTellError(f"the gradient of update {number + 1} is zero or not finite")
    is_half = any("half precision" in noted["notes"] for noted in (*ranks, single))
    close = _CLOSE_IN_HALF if is_half else _CLOSE
    factor = float(whole @ of_single / (of_single @ of_single))
    residual = float((whole - factor * of_single).norm() / whole.norm())
    shares = torch.linalg.lstsq(own.T, of_single[:, None], driver="gelsd").solution[:, 0]
    reduced = torch.linalg.lstsq(own.T, whole[:, None], driver="gelsd").solution[:, 0]
    differences = {place: float((held - of_one[place]).norm()) for place, held in of_several.items()}
    apart = [
        names.get(place, f"parameter {place}")
        for place, difference in differences.items()
        if difference > close * max(float(of_one[place].norm()), _NEGLIGIBLE * float(of_single.norm()))
    ]
    return Comparison(
        number,
        factor,
        residual,
        shares.tolist(),
        float((shares @ own - of_single).norm() / of_single.norm()),
        reduced.tolist(),
        is_reduced=all((_flat(other) - whole).norm() <= close * whole.norm() for other in others),
        is_right=abs(factor - 1) <= close and residual <= close and not apart,
        apart=apart,
        counts=_counts(ranks, number),
    )


def find_cause(compared: Comparison, notes: Sequence[str]) -> Finding:
    """Name the cause of a gradient that is not that of one process.

    Raises:
        CannotTellError: something was drawn that is not the same on one process.
    """
    n, update = len(compared.shares), compared.number + 1
    named = ", ".join(compared.apart[:_MOST_NAMED]) or "all together"
    more = len(compared.apart) - _MOST_NAMED
    apart = f"{named} and {more} more" if more > 0 else named
    measured = (
        f"in update {update} the gradient is {compared.factor:.4f} times the expected one, with a remainder "
        f"of {percent(compared.residual)}"
    )
    fitted = f"the gradient of one process is {_sum_of(compared.shares)}"
    if not compared.is_reduced:
        return Finding(
            "the ranks' gradients are not reduced",
            f"in update {update} the optimizers of the ranks got different gradients; rank 0's is "
            f"{_sum_of(compared.reduced)}; apart from one process: {apart}",
            "Call the wrapped model, not the module in it, and leave no_sync before an update's last "
            "backward.",
        )
    if "draws" in notes and compared.residual > _CLOSE:
        raise CannotTellError(f"the model draws random numbers in its forward, besides dropout; {measured}")
    if "collate" in notes and compared.residual > _CLOSE:
        raise CannotTellError(
            f"collate draws random numbers for batches of other shapes than one process has; {measured}"
        )
    is_added = all(abs(share - 1) < 0.1 for share in compared.reduced)
    if compared.residual <= _CLOSE_IN_HALF and _is_near(compared.factor, n):
        cause = f"the gradient is {n} times too large"
        if is_added:
            return Finding(
                cause,
                f"{measured}: the ranks' gradients are added up",
                "Divide their sum by the number of processes, or average them.",
            )
        return Finding(
            cause,
            f"{measured}: the ranks' gradients are averaged, and each rank's own is {n} times its share",
            "The loss is multiplied by the number of processes, as before a division by what all of them "
            "count, and is not divided so: the model's loss may ignore the count that it is given "
            "(num_items_in_batch of transformers, issue 47688).",
        )
    if compared.residual <= _CLOSE_IN_HALF and _is_near(compared.factor, 1 / n):
        return Finding(
            f"the gradient is {n} times too small",
            f"{measured}: the loss of a rank is a part of a sum, and the ranks' gradients are averaged",
            _DIVIDE,
        )
    if compared.shares_residual <= _CLOSE_IN_HALF and compared.residual > _CLOSE:
        what = _explain(compared)
        if what:
            return Finding(
                "the loss is a mean of means",
                f"{measured}; {fitted}, as {what}: each rank divides by what it counts itself",
                _DIVIDE,
            )
        return Finding(
            "the ranks' samples weigh otherwise than on one process",
            f"{measured}; {fitted}",
            "Look for a weight, a mean or a schedule in the loss that depends on the process.",
        )
    if compared.residual <= _CLOSE_IN_HALF and not compared.apart:
        return Finding(
            f"the gradient is {compared.factor:.4f} times that of one process",
            measured,
            "Look for a factor in the loss that depends on the number of processes.",
        )
    return Finding(
        "the gradient is no sum of the ranks' own",
        f"{measured}; apart from one process: {apart}; {fitted}, but for a remainder of "
        f"{percent(compared.shares_residual)}",
        "Look for what joins the samples of a batch, such as negatives within it or padding that is not "
        "masked, and for what depends on the rank in the forward.",
    )


def percent(share: float) -> str:
    """Write a share, which may be tiny, in percent."""
    return f"{100 * share:.2g}%"


def _explain(compared: Comparison) -> str:
    """Say which counts of the ranks are in the same proportion as their shares; empty where none are."""
    total = sum(compared.shares)
    for name, counts in sorted(compared.counts.items(), key=lambda counted: "-100" not in counted[0]):
        if len(set(counts)) > 1 and all(
            abs(share / total - count / sum(counts)) < 0.005
            for share, count in zip(compared.shares, counts, strict=True)
        ):
            return f"{' to '.join(map(str, counts))} is the proportion of {name}"
    return ""


def _sum_of(shares: Sequence[float]) -> str:
    return " + ".join(f"{share:.4f} of rank {rank}'s own" for rank, share in enumerate(shares))


def _is_near(factor: float, expected: float) -> bool:
    return abs(factor / expected - 1) < _CLOSE_IN_HALF


def _counts(ranks: Sequence[Noted], number: int) -> dict[str, list[int]]:
    """Add up what each rank counted in the batches of an update."""
    sums: list[dict[str, int]] = []
    for noted in ranks:
        counts = [counted for held in noted["passes"] if held["is_training"] for counted in held["counts"]]
        begin = sum(update["num_backwards"] for update in noted["updates"][:number])
        of_update = counts[begin : begin + noted["updates"][number]["num_backwards"]]
        sums.append(
            {name: sum(counted.get(name, 0) for counted in of_update) for name in (of_update or [{}])[0]}
        )
    return {name: [counted.get(name, 0) for counted in sums] for name in sums[0]}


def _filled(gradients: _Gradients, like: _Gradients) -> _Gradients:
    """Return gradients of all parameters, zeros for those that have none."""
    return {place: gradients.get(place, torch.zeros_like(like[place])).double() for place in sorted(like)}


def _flat(gradients: _Gradients) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
