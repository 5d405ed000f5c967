"""Finds state that lanewise cannot see: what objects hold besides parameters and buffers of the model."""

import random
import sys
import sysconfig
import threading
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import setitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lanewise.data import FileDataset, digest
from lanewise.world.shards import whole

_MARK = " (a generator)"
"""The end of the name of every generator of random numbers."""
_MAX_DEPTH = 8
_MAX_VALUES = 20_000
_MAX_ELEMENTS = 2**22
_NUM_RUNS = 4
_FAR = 2**10 * 3**2 * 5**4 * 7
"""Beyond most limits, and a multiple of most intervals at which a counter makes something happen."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_VARIABLE = (*_PLAIN, *_GENERATORS, dict, list, tuple, set, deque, torch.Tensor, np.ndarray, Iterator)
"""Types of what is looked at in a class or a module, which may have imported much else."""
_WITHOUT_STATE = ("torch.distributed.fsdp.", "lanewise.data.", "lanewise.transforms.")
"""Packages whose objects are skipped: what they keep shards a model, makes reading fast or tells how a block
runs, and changes no result."""
_FOREIGN_FOLDERS = tuple(
    f"{folder}/" for folder in (*sysconfig.get_paths().values(), *torch.__path__, Path(__file__).parents[1])
)
_COUNTS = ("read_bytes", "num_skipped")
"""Attributes in which a `FileDataset` counts what it read."""
_OF_TORCH = {*vars(nn.Module()), "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes of every module, such as its parameters, buffers and hooks, and those that FSDP adds."""
_Setter = Callable[[int | float], object]
_Found = tuple[str, Any, _Setter | None]
"""Name, value, and what gives it another value, where that is possible."""


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


def _walk_all(model: nn.Module, others: Mapping[str, object]) -> Iterator[_Found]:
    # The objects are kept alive, since the identity of a deleted one may be given to another.
    own_parts = (*model.modules(), *model.parameters(), *model.buffers())
    seen: dict[int, object] = {id(one): one for one in own_parts}
    for prefix, module in model.named_modules():
        name = ".".join(filter(None, ("model", prefix)))
        own = [(key, value) for key, value in vars(module).items() if key not in _OF_TORCH]
        own += [(one.__qualname__, one) for one in _classes_of(module)]
        found = (_walk(item, f"{name}.{key}", seen, 1, _setter(module, key)) for key, item in own)
        yield from islice(chain.from_iterable(found), _MAX_VALUES)
    for name, value in others.items():
        for one in _classes_of(value):
            yield from islice(_walk(one, f"{name}.{one.__qualname__}", seen, 0), _MAX_VALUES)
        yield from islice(_walk(value, name, seen, 0), _MAX_VALUES)


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names whose values differ, or that only one of the two has."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def generators(names: Sequence[str]) -> list[str]:
    """Return the names of generators of random numbers."""
    return [name for name in names if name.endswith(_MARK)]


def _walk(
    value: Any, name: str, seen: dict[int, object], depth: int, put: _Setter | None = None
) -> Iterator[_Found]:
    if isinstance(value, _PLAIN):
        yield name, value.item() if isinstance(value, np.generic) else value, put
        return
    if id(value) in seen or depth > _MAX_DEPTH or type(value).__module__.startswith(_WITHOUT_STATE):
        return
    seen[id(value)] = value
    if isinstance(value, _GENERATORS):
        yield f"{name}{_MARK}", _state_of(value), None
    elif isinstance(value, set | frozenset | Iterator) and not hasattr(value, "__dict__"):
        yield name, value, None  # of an iterator, how far it is, as of a counter of itertools
    elif (elements := _elements_of(value)) is not None:
        yield name, elements, getattr(elements, "fill_", None)
    else:
        for key, item in _parts_of(value):
            yield from _walk(item, f"{name}.{key}", seen, depth + 1, _setter(value, key))


def _setter(holder: Any, key: Any) -> _Setter | None:
    """Return a function that sets a part of an object; None where it cannot be set."""
    if isinstance(holder, dict | UserDict | list | deque):
        return partial(setitem, holder, key)
    if isinstance(holder, types.FunctionType):
        names = holder.__code__.co_freevars
        if key in names:
            return partial(setattr, (holder.__closure__ or ())[names.index(key)], "cell_contents")
        return partial(setitem, holder.__globals__, key) if key in holder.__globals__ else None
    return partial(setattr, holder, key) if isinstance(key, str) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return type(value) in (int, float)


def _elements_of(value: Any) -> Any:
    """Return the elements of a tensor or an array, at most four million; None for other objects."""
    if isinstance(value, torch.Tensor):
        value = whole(value)
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        flat = dense.reshape(-1)
        return flat[:: max(1, flat.numel() // _MAX_ELEMENTS)]
    if isinstance(value, np.memmap):
        return np.empty(0)  # a file; looking at it would read all of it
    if isinstance(value, np.ndarray):
        return None if value.dtype == object else value.reshape(-1)[:: max(1, value.size // _MAX_ELEMENTS)]
    return None


def _state_of(generator: Any) -> Any:
    """Return the state of a generator of random numbers."""
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
    return generator.get_state()


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        kinds = (types.FunctionType, staticmethod, classmethod, *_VARIABLE)
        own = ((key, item) for key, item in vars(value).items() if isinstance(item, kinds))
        yield from (part for part in own if not part[0].startswith("__"))
    elif isinstance(value, dict | UserDict):  # not any mapping: an archive of arrays would be read
        for position, (key, item) in enumerate(value.items()):
            yield (position if isinstance(key, torch.Tensor) else key), item  # as an optimizer's state
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)
    elif isinstance(value, staticmethod | classmethod):
        yield "function", value.__func__
    elif callable(cache_info := getattr(value, "cache_info", None)):  # what it keeps cannot be seen
        yield "cache", str(cache_info().currsize)
        yield "function", value.__wrapped__
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, partial):
        yield from (("function", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, nn.Module):  # one that is not part of the model
        yield from (item for item in vars(value).items() if item[0] not in _OF_TORCH)
        yield from value.state_dict(keep_vars=True).items()
        yield from value._modules.items()
    else:
        counts = _COUNTS if isinstance(value, FileDataset) else ()
        yield from (item for item in getattr(value, "__dict__", {}).items() if item[0] not in counts)
        yield from _slots_of(value)


def _slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    for one in type(value).__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function of the user keeps, and the variables of modules that it uses."""
    if _is_foreign(function.__code__.co_filename):  # maybe a decorator's, around the user's
        yield from (item for item in vars(function).items() if item[0] == "__wrapped__")
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    names = dict.fromkeys(_names_in(function.__code__))
    for name in names:
        item = function.__globals__.get(name)
        if isinstance(item, types.ModuleType) and not _is_foreign(getattr(item, "__file__", None) or "<"):
            parts = ((f"{name}.{part}", vars(item).get(part)) for part in names)
            yield from (part for part in parts if _is_variable(part[1]))
        elif _is_variable(item):
            yield name, item


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of variables and attributes in a function, and in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_variable(item: object) -> bool:
    """Tell whether a name in a module stands for something that may keep state."""
    if isinstance(item, types.FunctionType):
        return not _is_foreign(item.__code__.co_filename)
    kind = item if isinstance(item, type) else type(item)
    is_kept = isinstance(item, _VARIABLE) or hasattr(item, "cache_info")
    return is_kept or kind is threading.local or _is_of_the_user(kind)


def _is_foreign(file: str) -> bool:
    return file.startswith((*_FOREIGN_FOLDERS, "<"))


def _classes_of(value: object) -> Iterator[type]:
    """Yield the classes of an object that the user wrote: a class may keep state too, such as a counter."""
    return filter(_is_of_the_user, type(value).__mro__)


def _is_of_the_user(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not _is_foreign(file)
