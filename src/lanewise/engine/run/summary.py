"""Says what a model is made of: its parts, with their parameters and bytes."""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import nn

from lanewise.reduce.blocks import CONTAINERS

_MOST_PARTS = 20


class _Part(NamedTuple):
    name: str
    kind: str
    num_parameters: int
    num_trained: int
    num_bytes: int


def summarize(model: nn.Module, ungrouped: Collection[nn.Parameter] = ()) -> str:
    """Return a line for each part of a model that has parameters; equal parts in a row share one.

    Parts are the children of the model and of the containers among them. A parameter that several parts
    share counts in each. Those in no group of the optimizer (`ungrouped`) are not trained.
    """
    parts = list(_parts(model, "", ungrouped))
    own = _Part("(own)", type(model).__name__, *_sizes(model, ungrouped, recurse=False))
    if own.num_parameters:
        parts.append(own)
    merged = [_merge(list(group)) for _, group in groupby(parts, key=lambda part: part[1:])]
    rows = [part for part in merged if part.num_parameters]
    rest = rows[_MOST_PARTS:]
    if rest:
        sizes = (sum(column) for column in zip(*(part[2:] for part in rest), strict=True))
        rows[_MOST_PARTS:] = [_Part(f"{len(rest)} further parts", "", *sizes)]
    if not rows:
        return ""
    name_width, kind_width = max(len(row.name) for row in rows), max(len(row.kind) for row in rows)
    return "\n".join(
        f"{row.name:<{name_width}}  {row.kind:<{kind_width}}  {row.num_parameters:>13,} parameters"
        f"{_trained(row)}  {row.num_bytes / 2**20:,.4g} MiB"
        for row in rows
    )


def _parts(module: nn.Module, prefix: str, ungrouped: Collection[nn.Parameter]) -> Iterator[_Part]:
    for name, child in module.named_children():
        if isinstance(child, CONTAINERS):
            yield from _parts(child, f"{prefix}{name}.", ungrouped)
        else:
            yield _Part(prefix + name, type(child).__name__, *_sizes(child, ungrouped, recurse=True))


def _sizes(module: nn.Module, ungrouped: Collection[nn.Parameter], *, recurse: bool) -> tuple[int, int, int]:
    """Return the numbers of parameters, of those that are trained, and of their bytes."""
    parameters = list(module.parameters(recurse))
    trained = (one.numel() for one in parameters if one.requires_grad and one not in ungrouped)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return sum(parameter.numel() for parameter in parameters), sum(trained), num_bytes


def _merge(parts: Sequence[_Part]) -> _Part:
    """Return one line for parts in a row that are equal but for their names."""
    names = dict.fromkeys([parts[0].name, parts[-1].name])
    return _Part(" to ".join(names), parts[0].kind, *(len(parts) * size for size in parts[0][2:]))


def _trained(part: _Part) -> str:
    if part.num_trained == part.num_parameters:
        return ""
    return f", {part.num_trained:,} trained" if part.num_trained else ", not trained"
