"""Walks through everything that objects of the user hold, and finds their generators of random numbers."""

import inspect
import random
import sys
import sysconfig
import threading
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from operator import setitem
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.processes.world.shards import is_sharded

SEED_THEM = "Draw from the default generators of torch, numpy and random: they are seeded for every lane."
OR_MAKE_IT_ANEW = (
    "Or make the generator anew in each call, from a draw of torch's default one or, in a forward or a loss, "
    "from torch.initial_seed()."
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_MAX_DEPTH = 8
_MAX_VALUES = 20_000
_MAX_ELEMENTS = 2**22
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_VARIABLE = (*_PLAIN, *_GENERATORS, dict, list, tuple, set, deque, torch.Tensor, np.ndarray, Iterator)
"""Types of what is looked at in a class or a module, which may have imported much else."""
_CONTAINERS = (dict, UserDict, list, tuple, deque, partial, types.MethodType, types.SimpleNamespace)
_WITHOUT_STATE = ("torch.distributed.fsdp.", "lanewise.data.", "lanewise.engine.transforms.")
"""Packages whose objects are skipped: what they keep shards a model, makes reading fast or tells how a block
runs, and changes no result."""
_FOREIGN_FOLDERS = tuple(
    f"{folder}/" for folder in (*sysconfig.get_paths().values(), *torch.__path__, Path(__file__).parents[1])
)
_OF_TORCH = {*vars(nn.Module()), "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes of every module, such as its parameters, buffers and hooks, and those that FSDP adds."""
_BUILDING = {
    *("__init__", "__new__", "__post_init__", "__setstate__", "reset_parameters"),
    *("build_model", "train_dataset", "eval_datasets", "parameter_groups", "build_metrics"),
}
"""Methods that run while things are built, before any lane."""


class Held(NamedTuple):
    """A value that some object holds: a plain one, a tensor, an array, a set, an iterator or a generator."""

    name: str
    """Its dotted name."""
    value: Any
    path: tuple[tuple[Any, Any], ...]
    """What holds it, the outermost first, each with the key of what is held."""


def walk(model: nn.Module, others: Mapping[str, object], *, into_datasets: bool = True) -> Iterator[Held]:
    """Yield every value outside of the model's parameters and buffers, each once.

    Args:
        model: its modules' own attributes count.
        others: whatever else may hold state, by name: all that can be reached from it counts.
        into_datasets: whether attributes of these that are datasets count.
    """
    # The objects are kept alive, since the identity of a deleted one may be given to another.
    own_parts: list[object] = [*model.modules(), *model.parameters(), *model.buffers()]
    if not into_datasets:
        parts = chain.from_iterable(getattr(other, "__dict__", {}).values() for other in others.values())
        own_parts += (part for part in parts if isinstance(part, Dataset))
    seen: dict[int, object] = {id(part): part for part in own_parts}
    for prefix, module in model.named_modules():
        name = ".".join(filter(None, ("model", prefix)))
        own = [(key, value) for key, value in vars(module).items() if key not in _OF_TORCH]
        own += _classes_of(module)
        found = (_walk(item, f"{name}.{key}", seen, ((module, key),)) for key, item in own)
        yield from islice(chain.from_iterable(found), _MAX_VALUES)
    for name, value in others.items():
        yield from islice(_walk(value, name, seen, ()), _MAX_VALUES)


def own_generators(model: nn.Module, **others: object) -> list[Held]:
    """Return the generators of random numbers that these objects hold, but for the default ones.

    Args:
        model: see `walk`.
        others: see `walk`.
    """
    defaults: tuple[Any, ...] = (
        random.random.__self__,  # type: ignore[attr-defined]
        np.random.get_state.__self__,  # type: ignore[attr-defined]
        torch.default_generator,
        *getattr(torch.get_device_module(), "default_generators", ()),
    )
    found = (held for held in walk(model, others) if isinstance(held.value, _GENERATORS))
    return [held for held in found if all(held.value is not default for default in defaults)]


def state_of(generator: Generator) -> Any:
    """Return the state of a generator of random numbers."""
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
        case np.random.RandomState():
            return generator.get_state(legacy=False)
    return generator.get_state()


def elements_of(value: Any) -> Any:
    """Return what tells the value of what `walk` finds: of a tensor at most four million elements."""
    if isinstance(value, Generator):
        return state_of(value)
    if isinstance(value, np.memmap):
        return np.empty(0)  # a file; looking at it would read all of it
    if isinstance(value, np.ndarray):
        return None if value.dtype == object else value.reshape(-1)[:: max(1, value.size // _MAX_ELEMENTS)]
    if isinstance(value, torch.Tensor):
        local: Any = value
        local = local.to_local() if is_sharded(value) else local
        dense = local.detach() if local.layout is torch.strided else local.detach().to_dense()
        flat = dense.reshape(-1)
        return flat[:: max(1, flat.numel() // _MAX_ELEMENTS)]
    return value.item() if isinstance(value, np.generic) else value


def setter_of(held: Held) -> Callable[[Any], object] | None:
    """Return a function that puts a value where another one is held; None where that is not possible."""
    holder, key = held.path[-1] if held.path else (None, None)
    if isinstance(holder, dict | UserDict | list | deque):
        return partial(setitem, holder, key)
    if isinstance(holder, types.FunctionType):
        names = holder.__code__.co_freevars
        if key in names:
            return partial(setattr, (holder.__closure__ or ())[names.index(key)], "cell_contents")
        return partial(setitem, holder.__globals__, key) if key in holder.__globals__ else None
    return partial(setattr, holder, key) if isinstance(key, str) else None


def is_used_in_lanes(held: Held, others: Iterable[object]) -> bool:
    """Tell whether code of the user may use a value while lanes run, as far as names show it.

    What a library's object holds is not the user's to name, and what only `__init__` and the like name was
    used to build something. A tensor within it is used where the object is.

    Args:
        held: the value.
        others: objects whose code may use it, besides those that hold it.
    """
    holders = [pair for pair in held.path if not isinstance(pair[0], _CONTAINERS)]
    while isinstance(held.value, torch.Tensor) and holders and not _is_users(holders[-1][0]):
        holders.pop()
    functions = [holder for holder, _ in holders if isinstance(holder, types.FunctionType)]
    if not holders or any(function.__name__ in _BUILDING for function in functions):
        return False
    holder, key = holders[-1]
    if isinstance(holder, types.FunctionType):
        return True
    kinds = [
        holder if isinstance(holder, type) else type(holder)
        for holder in (*(holder for holder, _ in holders), *others)
    ]
    return _is_of_the_user(kinds[len(holders) - 1]) and key in _names_in_lanes(kinds)


def _names_in_lanes(kinds: Iterable[type]) -> set[str]:
    """Return the names that methods of the user use, except those that only build."""
    used: dict[str, set[str]] = {}
    for kind in filter(_is_of_the_user, chain.from_iterable(kind.__mro__ for kind in kinds)):
        for name, item in vars(kind).items():
            function = inspect.unwrap(getattr(item, "fget", None) or getattr(item, "__func__", item))
            if isinstance(function, types.FunctionType):
                used.setdefault(name, set()).update(_names_in(function.__code__))
    of_building = set().union(*(names for name, names in used.items() if name in _BUILDING))
    of_others = set().union(*(names for name, names in used.items() if name not in _BUILDING))
    helpers = {name for name in of_building - of_others if name.startswith("_")} | _BUILDING
    return set().union(*(names for name, names in used.items() if name not in helpers))


def _walk(
    value: Any, name: str, seen: dict[int, object], path: tuple[tuple[Any, Any], ...]
) -> Iterator[Held]:
    if isinstance(value, _PLAIN):
        yield Held(name, value, path)
        return
    if isinstance(value, random.SystemRandom):  # draws from the system, and has no state
        return
    if id(value) in seen or len(path) > _MAX_DEPTH or type(value).__module__.startswith(_WITHOUT_STATE):
        return
    seen[id(value)] = value
    is_leaf = isinstance(value, (*_GENERATORS, torch.Tensor, np.ndarray))
    if is_leaf or (isinstance(value, set | frozenset | Iterator) and not hasattr(value, "__dict__")):
        yield Held(name, value, path)  # an iterator for how far it is, as a counter of itertools
        return
    parts: list[tuple[Any, Any]] = []
    with suppress(Exception):  # of an attribute that raises, or a dict that a thread changes meanwhile
        parts += islice(chain(_classes_of(value), _parts_of(value)), _MAX_VALUES)
    for key, item in parts:
        yield from _walk(item, f"{name}.{key}", seen, (*path, (value, key)))


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        kinds = (types.FunctionType, staticmethod, classmethod, *_VARIABLE)
        own = [(key, item) for key, item in vars(value).items() if isinstance(item, kinds)]
        own.sort(key=lambda part: part[0] in _BUILDING)  # a function is known by the first that names it
        yield from (
            part for part in own if isinstance(part[1], types.FunctionType) or not part[0].startswith("__")
        )
    elif isinstance(value, dict | UserDict):  # not any mapping: an archive of arrays would be read
        for position, (key, item) in enumerate(value.items()):
            yield (position if isinstance(key, torch.Tensor) else key), item  # as an optimizer's state
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)
    elif isinstance(value, staticmethod | classmethod):
        yield "function", value.__func__
    elif isinstance(value, _CACHED):  # what it keeps cannot be seen
        yield "cache", str(value.cache_info().currsize)
        yield "function", value.__wrapped__
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, partial):
        yield from (("function", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, nn.Module):  # one that is not part of the model
        yield from (item for item in vars(value).items() if item[0] not in _OF_TORCH)
        yield from value.named_parameters(recurse=False)
        yield from chain(value.named_buffers(recurse=False), value.named_children())
    else:
        yield from getattr(value, "__dict__", {}).items()
        yield from _slots_of(value)


def _slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
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
    for name in filter(function.__globals__.__contains__, names):
        item = function.__globals__[name]
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
    return isinstance(item, (*_VARIABLE, _CACHED, threading.local)) or _is_of_the_user(kind)


def _is_foreign(file: str) -> bool:
    return file.startswith((*_FOREIGN_FOLDERS, "<"))


def _classes_of(value: object) -> list[tuple[str, type]]:
    """Return the classes of an object that the user wrote: a class may keep state too, such as a counter."""
    return [(kind.__qualname__, kind) for kind in type(value).__mro__ if _is_of_the_user(kind)]


def _is_users(holder: object) -> bool:
    """Tell whether the user wrote a function, a class, or the class of an object."""
    kind = holder if isinstance(holder, type) else type(holder)
    return isinstance(holder, types.FunctionType) or _is_of_the_user(kind)


@cache
def _is_of_the_user(kind: type) -> bool:
    if kind.__module__ == "__main__":  # of a script: another process has another module of this name
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not _is_foreign(file)


_CACHED = type(_is_of_the_user)
"""The type of a function that `functools.cache` or `lru_cache` decorates."""
