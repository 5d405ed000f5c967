"""Says what in a saved state does not fit the objects that are to go on from it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

CLASS = "class"
"""Where the state of an optimizer or a scheduler names its class."""
EXTRA_STATE = "_extra_state"
"""How the names end under which `get_extra_state` is in a state dict."""


def module_mismatches(current: Mapping[str, Any], saved: object, what: str) -> Iterator[str]:
    """Say in what the states of two modules differ: their names, shapes and dtypes."""
    if not isinstance(saved, Mapping):
        yield f"{what} is {_show(saved)} in it"
        return
    for name in current.keys() - saved.keys():
        yield f"{what} {name} is not in it"
    for name in saved.keys() - current.keys():
        yield f"{what} {name} is not in this run"
    for name in current.keys() & saved.keys():
        mine, theirs = current[name], saved[name]
        if name.endswith(EXTRA_STATE):
            continue
        if isinstance(mine, torch.Tensor) != isinstance(theirs, torch.Tensor):
            yield f"{what} {name} is no tensor in one of them"
        elif isinstance(mine, torch.Tensor) and (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            yield f"{what} {name} is {_size(theirs)} in it and {_size(mine)} in this run"


def scheduler_mismatches(current: Mapping[str, Any], saved: object, what: str) -> list[str]:
    """Say in what two schedulers differ: their class, and the kinds of their values."""
    if not isinstance(saved, Mapping) or current[CLASS] != saved.get(CLASS):
        theirs = saved.get(CLASS) if isinstance(saved, Mapping) else _show(saved)
        return [f"the {what} was a {theirs}, and is a {current[CLASS]} now"]
    return list(kind_mismatches(current, saved, what))


def optimizer_mismatches(
    optimizer: Optimizer,
    current: Mapping[str, Any],
    saved: object,
    names: Mapping[torch.Tensor, str],
    what: str,
) -> Iterator[str]:
    """Say in what two optimizers differ: class, groups, kinds of options, and what there is of a parameter.

    Args:
        optimizer: of this run.
        current: its state, as `take_optimizer` gives it.
        saved: what should be such a state.
        names: of the parameters.
        what: how to name the optimizer.
    """
    if not isinstance(saved, Mapping) or current[CLASS] != saved.get(CLASS):
        theirs = saved.get(CLASS) if isinstance(saved, Mapping) else _show(saved)
        yield f"the {what} was a {theirs}, and is a {current[CLASS]} now"
        return
    groups, states = saved.get("groups"), saved.get("state")
    if saved.keys() != current.keys() or not isinstance(groups, list) or not isinstance(states, Mapping):
        yield f"{what} is not in it as a save writes it"
        return
    if len(current["groups"]) != len(groups):
        yield f"{what} has {len(groups)} groups in it and {len(current['groups'])} in this run"
        return
    for name in sorted(current["state"].keys() - states.keys()):
        yield f"{what} has no state of {name} in it"
    for name in states.keys() - current["state"].keys():
        yield f"{what} has a state of {name} in it, which is no parameter of its"
    for number, (group, mine, theirs) in enumerate(
        zip(optimizer.param_groups, current["groups"], groups, strict=True)
    ):
        mismatches = list(_group_mismatches(mine, theirs, f"group {number} of the {what}"))
        yield from mismatches
        if not mismatches:
            saved_states = {parameter: states.get(names[parameter], {}) for parameter in group["params"]}
            for parameter, reason in _state_mismatches(type(optimizer), theirs, saved_states):
                yield f"the state of {names[parameter]} in {what} {reason}"


def kind_mismatches(current: Any, saved: Any, path: str) -> Iterator[str]:
    """Say where a value is of another kind than the present one: a number, a text, a list of as many, ...

    A present value that is None or empty tells no kind; a number must be finite where the present one is.
    """
    kind = _kind(current)
    if current is None or (kind is bool and saved is None):  # foreach and fused are not chosen, or are
        return
    if kind is not _kind(saved):
        yield _differs(path, saved, current)
    elif kind is Mapping and current:
        if current.keys() != saved.keys():
            yield f"{path} has other parts: {', '.join(sorted(map(str, current.keys() ^ saved.keys())))}"
        for key in current.keys() & saved.keys():
            mismatches = _function_mismatches if key == _USER_FUNCTIONS else kind_mismatches
            yield from mismatches(current[key], saved[key], f"{path} {key}")
    elif kind in (list, tuple) and current:
        if len(current) != len(saved):
            yield f"{path} has {len(saved)} items in it and {len(current)} in this run"
        for number, (mine, theirs) in enumerate(zip(current, saved, strict=False)):
            yield from kind_mismatches(mine, theirs, f"{path} {number}")
    elif not _is_alike(kind, current, saved):
        yield _differs(path, saved, current)


def _function_mismatches(current: Any, saved: Any, path: str) -> Iterator[str]:
    """Say where the attributes of a user's functions are not there; there may be more than now."""
    is_good = isinstance(saved, list) and len(saved) == len(current)
    for mine, theirs in zip(current, saved if is_good else current, strict=True):
        is_good &= _kind(mine) is _kind(theirs) and (mine is None or mine.keys() <= theirs.keys())
    if not is_good:
        yield f"{path} are not of as many functions, or lack attributes"


def _is_alike(kind: object, current: Any, saved: Any) -> bool:
    """Tell whether a value can take the place of another one of its kind."""
    if kind is Counter:
        return all(_kind(one) is float for pair in saved.items() for one in pair)
    if kind is torch.Tensor and current.dim():
        return (current.shape, current.dtype) == (saved.shape, saved.dtype)
    if kind in (float, torch.Tensor):
        return _is_finite(saved) or not _is_finite(current)
    return True


def _group_mismatches(current: Mapping[str, Any], saved: object, what: str) -> Iterator[str]:
    """Say in what a parameter group differs: its parameters, and the kinds of its options."""
    if not isinstance(saved, Mapping):
        yield f"{what} is {_show(saved)} in it"
        return
    if not isinstance(saved.get("params"), list) or current["params"] != saved["params"]:
        yield f"{what} has other parameters"
    if current.keys() != saved.keys():
        differing = ", ".join(sorted(map(str, current.keys() ^ saved.keys())))
        yield f"{what} has other options: {differing}"
    for name in (current.keys() & saved.keys()) - {"params"}:
        yield from kind_mismatches(current[name], saved[name], f"{what}: {name}")


def _state_mismatches(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], states: Mapping[torch.Tensor, Any]
) -> Iterator[tuple[torch.Tensor, str]]:
    """Say which parameter's state is not as the others', or as such an optimizer makes it."""
    fresh = _fresh_states(optimizer_class, options, list(states))
    keys_by_dim: dict[int, Any] = {}  # some optimizers keep other things of a matrix than of a vector
    for parameter, state in states.items():
        if not isinstance(state, Mapping):
            yield parameter, f"is {_show(state)} in it"
        elif state:
            likely = fresh.get(parameter)
            keys = keys_by_dim.setdefault(parameter.dim(), state.keys()) if likely is None else likely.keys()
            if state.keys() != keys:
                yield (
                    parameter,
                    f"has {', '.join(map(str, state))} in it instead of {', '.join(map(str, keys))}",
                )
            elif likely is not None:
                for mismatch in kind_mismatches(likely, state, "has a value that does not fit:"):
                    yield parameter, mismatch


def _fresh_states(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], parameters: list[torch.Tensor]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return what one of torch's optimizers keeps of parameters after a step; nothing where that is unknown.

    The step is taken with tensors without memory, by an optimizer of our own making.
    """
    if not f"{optimizer_class.__module__}.".startswith("torch.optim."):
        return {}
    shadows = [
        torch.empty(parameter.shape, dtype=parameter.dtype, device="meta", requires_grad=True)
        for parameter in parameters
    ]
    for shadow in shadows:
        shadow.grad = torch.empty_like(shadow)
    implementation = dict.fromkeys(
        options.keys() & {"foreach", "fused", "capturable", "differentiable"}, False
    )
    build: Any = optimizer_class
    try:
        optimizer: Optimizer = build([{**options, **implementation, "params": shadows}])
        with suppress(RuntimeError):  # some look at a value, which does not exist, after they made the states
            optimizer.step()
    except (TypeError, ValueError):  # it has conditions that this cannot meet, such as a closure
        return {}
    return {
        parameter: dict(optimizer.state[shadow])
        for parameter, shadow in zip(parameters, shadows, strict=True)
        if shadow in optimizer.state or not optimizer.state
    }


def _kind(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float
    return next((kind for kind in _KINDS if isinstance(value, kind)), type(value))


def _is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta or (value.dim() == 0 and bool(torch.isfinite(value)))
    # Torch takes no longer integers.
    return value.bit_length() < 63 if isinstance(value, int) else math.isfinite(value)


def _differs(what: str, saved: object, current: object) -> str:
    return f"{what} is {_show(saved)} in it and {_show(current)} in this run"


def _size(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _show(value: object) -> str:
    if isinstance(value, torch.Tensor) and (value.dim() or value.is_meta):
        return _size(value)
    return (
        f"{value!r:.60}"
        if value is None or isinstance(value, bool | int | float | str)
        else f"a {type(value)}"
    )


_KINDS = (bool, str, list, tuple, Counter, Mapping, torch.Tensor)
_USER_FUNCTIONS = "lr_lambdas"
"""Where LambdaLR keeps the attributes of a user's objects."""
