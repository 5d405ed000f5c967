"""What a lane gives for the whole step, checked: rows that are gathered, and totals that are added up."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from lanewise.errors import TaskError
from lanewise.processes.device.nested import map_leaves, plain, structure, tensors_in


class LaneParts(NamedTuple):
    """What a lane gives in `Loss.gather` and `Loss.total`: dicts, lists and tuples of tensors, by name."""

    gather: Mapping[str, Any]
    """Tensors whose first dimension are the lane's rows."""
    total: Mapping[str, Any]

    @property
    def form(self) -> str:
        """What must be equal in all lanes: all but the number of rows; empty where there is nothing."""
        return "; ".join([*_forms("gather", self.gather, "rows"), *_forms("total", self.total)])

    @property
    def template(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same without values and rows, from which a process without samples knows the form."""
        gather = map_parts(lambda leaf: torch.empty_like(leaf[:0], device="meta"), self.gather)
        return gather, map_parts(partial(torch.empty_like, device="meta"), self.total)


NO_PARTS = LaneParts({}, {})
"""Those of a loss that gives none."""


def lane_parts(gather: object, total: object, what: str) -> LaneParts:
    """Check what the user's code gave, and return it without gradients. Waits for no device.

    Args:
        gather: see `Loss.gather`.
        total: see `Loss.total`.
        what: the name of the loss in an error message.

    Raises:
        TaskError: if one is no mapping of names to tensors, rows have no first dimension, or a total is
            complex.
    """
    return LaneParts(_checked("gather", gather, what), _checked("total", total, what))


def map_parts(function: Callable[[torch.Tensor], torch.Tensor], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a function to the tensors of `LaneParts`, which then have one order of names in all lanes."""
    return {name: map_leaves(function, value, _is_leaf) for name, value in sorted(parts.items())}


def _checked(kind: str, given: object, what: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise TaskError(
            f"{what} has {kind}={given!r:.60}: need a mapping of names to tensors, as "
            f'{kind}={{"keys": keys}}.'
        )

    def check(leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            wrong = f"{leaf!r:.60}, and not a dense tensor"
        elif kind == "gather" and not leaf.dim():
            wrong = "a scalar, which has no rows. Give it a first dimension, as by keys.unsqueeze(0)"
        elif kind == "total" and leaf.is_complex():
            wrong = "complex numbers. Give them as real ones, by torch.view_as_real"
        else:
            return leaf.detach()
        raise TaskError(f"{what} has in {kind} under {name!r} {wrong}.")

    checked = {}
    for name, value in given.items():
        checked[name] = map_leaves(check, plain(value), _is_leaf)
    return checked


def _is_leaf(value: object) -> bool:
    return not isinstance(value, dict | list | tuple)


def _forms(kind: str, parts: Mapping[str, Any], *rows: str) -> Iterator[str]:
    for name, value in sorted(parts.items()):
        leaves = [
            f"{[*rows, *leaf.shape[len(rows) :]]} {leaf.dtype}".replace("'", "").replace("torch.", "")
            for leaf in tensors_in(value)
        ]
        container = "" if isinstance(value, torch.Tensor) else f" in {structure(value)}"
        yield f"{kind} {name}: {', '.join(leaves)}{container}"
