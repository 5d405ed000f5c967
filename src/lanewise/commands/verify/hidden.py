"""Finds state that lanewise cannot see: what objects hold besides parameters and buffers of the model."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lanewise.data import FileDataset, digest
from lanewise.engine.reachable import (
    Generator,
    elements_of,
    is_used_in_lanes,
    own_generators,
    setter_of,
    state_of,
    walk,
)
from lanewise.processes.world.shards import whole

_MARK = " (a generator)"
"""The end of the name of every generator of random numbers."""
_NUM_RUNS = 4
_FAR = 40_320_000
"""This number is beyond most limits, and a multiple of most intervals at which a counter makes something
happen: of the powers of ten up to 10,000, of those of two up to 1,024, of 7, 9, 24 and 60."""
_COUNTS = ("read_bytes", "num_skipped")
"""Attributes in which a `FileDataset` counts what it read."""
_Setter = Callable[[int | float], object]


def hidden_state(model: nn.Module, **others: object) -> dict[str, str]:
    """Return a digest of every value outside of the model's parameters and buffers, by its dotted name.

    Collective where tensors are sharded: every rank must call this.

    Args:
        model: its modules' own attributes count.
        others: whatever else may hold state, by name: all that can be reached from it counts.
    """
    return {name: digest(value) for name, value, _ in _walk_all(model, others)}


def numbers_that_matter(run: Callable[[], bool], model: nn.Module, **others: object) -> list[str]:
    """Return the names of numbers that change the result of a run when they are set far off.

    Such a number may be a counter that acts rarely, or a level that acts beyond a limit. A few runs would not
    show it, so the numbers that a run changes are set far ahead for some runs, and restored. A value that is
    kept once, as a memo, is not tried, and a number that each run sets anew before it is used has no effect.

    Args:
        run: runs once, and tells whether the result was the usual one.
        model: see `hidden_state`.
        others: see `hidden_state`.
    """
    before = numbers(model, **others)
    run()
    after = numbers(model, **others)
    steps = {name: value - before[name][0] for name, (value, _) in after.items() if name in before}
    names = [name for name, step in steps.items() if step]

    def matter(names: Sequence[str], far: int) -> bool:
        try:
            for name in names:
                value, put = after[name]
                # The second or the third run reaches it: a number may be used before or after it changes.
                put(type(value)(far if steps[name] > 0 else -far) - 2 * steps[name])
            return not all(run() for _ in range(_NUM_RUNS))
        except Exception:  # noqa: BLE001 - whatever such a number does that no run has
            return False
        finally:
            for name in names:
                value, put = after[name]
                put(value)

    for far in (_FAR, -_FAR) if names else ():
        if matter(names, far):
            return [name for name in names if matter([name], far)] or names
    return []


def numbers(model: nn.Module, **others: object) -> dict[str, tuple[int | float, _Setter]]:
    """Return the numbers among the values of `hidden_state` that can be set, each with what sets it.

    A tensor of one element is a number too.
    """
    return {
        name: (value.item() if isinstance(value, torch.Tensor) else value, put)
        for name, value, put in _walk_all(model, others)
        if put is not None and _is_number(value)
    }


def _walk_all(model: nn.Module, others: Mapping[str, object]) -> Iterator[tuple[str, Any, _Setter | None]]:
    """Yield name and value of all that `walk` finds, and what sets it, where that is possible."""
    for held in walk(model, others):
        name, value, path = held
        holder, key = path[-1] if path else (None, None)
        if isinstance(holder, FileDataset) and key in _COUNTS:
            continue
        mark = _MARK if isinstance(value, Generator) else ""
        seen = elements_of(whole(value) if isinstance(value, torch.Tensor) else value)
        if isinstance(value, torch.Tensor | np.ndarray):
            if seen is not None:
                yield name, seen, getattr(seen, "fill_", None)
        else:
            yield f"{name}{mark}", seen, setter_of(held)


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names whose values differ, or that only one of the two has."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


@dataclass(frozen=True)
class GeneratorProbe:
    """Names of generators of random numbers that lanewise does not seed."""

    moved: Sequence[str] = ()
    """Those that a run moves on from where they are."""
    unmoved: Sequence[str] = ()
    """Those that no run moved, though code of the user may use them."""


def probe_generators(run: Callable[[], str], model: nn.Module, **others: object) -> GeneratorProbe:
    """Run twice, the second time with other states of the generators that are not the default ones.

    One that each run seeds, or makes anew, ends in the same state in both. One that is copied before it is
    used changes the result without moving, as a seed does. Neither is named.

    Args:
        run: reads and computes from equal states of the default generators, and returns a digest of both.
        model: see `hidden_state`.
        others: see `hidden_state`.
    """

    def states() -> dict[str, str]:  # by name, since a run may put another object there
        found = own_generators(model, **others)
        return {f"{held.name}{_MARK}": digest(state_of(held.value)) for held in found}

    held = own_generators(model, **others)
    if not held:
        return GeneratorProbe()
    put_backs = [_put_back(source.value) for source in held]
    try:
        first = states()
        usual, after_first = run(), states()
        for source in held:
            _draw(source.value)
        second = states()
        is_same, after_second = run() == usual, states()
    finally:
        for put_back in put_backs:
            put_back()
    unmoved = [name for name, state in second.items() if after_second.get(name) == state]
    unmoved = [name for name in unmoved if after_first.get(name) == first.get(name)]
    moved = [
        name for name in first if name not in unmoved and after_first.get(name) != after_second.get(name)
    ]
    used = [f"{source.name}{_MARK}" for source in held if is_used_in_lanes(source, others.values())]
    unmoved = [name for name in unmoved if name in used and (is_same or moved)]
    return GeneratorProbe(moved, unmoved)


def _draw(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        torch.rand(1, generator=generator, device=generator.device)
    else:
        generator.random()


def _put_back(generator: Any) -> Callable[[], None]:
    """Return a function that restores the state that a generator has now."""
    match generator:
        case np.random.Generator():
            return partial(setattr, generator.bit_generator, "state", state_of(generator))
        case random.Random():
            return partial(generator.setstate, state_of(generator))
    return partial(generator.set_state, state_of(generator))


def generators(names: Sequence[str]) -> list[str]:
    """Return the names of generators of random numbers."""
    return [name for name in names if name.endswith(_MARK)]


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return type(value) in (int, float)
