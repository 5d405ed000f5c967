"""Describes the mismatches between a saved state and the objects that are to be restored from it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

CLASS = "class"
"""The key of the class name in the state of an optimizer or a scheduler."""
EXTRA_STATE = "_extra_state"
"""The end of the keys of a state dict under which the values of `get_extra_state` are."""


def optimizer_mismatches(
    optimizer: Optimizer,
    current: Mapping[str, Any],
    saved: Mapping[str, Any],
    names: Mapping[torch.Tensor, str],
    what: str,
) -> Iterator[str]:
    """Yield the differences between two optimizers: groups, kinds of options, states of parameters.

    Args:
        optimizer: the optimizer of this run.
        current: its state, as `take_optimizer` returns it.
        saved: the saved state.
        names: the names of the parameters.
        what: the name of the optimizer in an error message.
    """
    states: dict[str, Any] = {name: {} for name in current["state"]}
    mismatches = list(kind_mismatches({**current, "state": states}, saved, what))
    yield from mismatches
    if mismatches:
        return
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        of_group = {parameter: saved["state"][names[parameter]] for parameter in group["params"]}
        fresh = _fresh_states(type(optimizer), options, list(of_group))
        keys_by_dim: dict[int, Any] = {}  # some optimizers have other states for matrices than for vectors
        for parameter, state in of_group.items():
            if state:  # of one that was never updated there is none
                keys = keys_by_dim.setdefault(parameter.dim(), dict.fromkeys(state))
                yield from kind_mismatches(
                    fresh.get(parameter) or keys, state, f"{what} state {names[parameter]}"
                )


def kind_mismatches(current: Any, saved: Any, path: str) -> Iterator[str]:
    """Yield where a saved value is of another kind than the current one: number, text, list of a length, ...

    A current value that is None or empty has no kind to compare. A saved number must be finite if the current
    one is.
    """
    kind = _kind(current)
    if current is None or (kind is bool and saved is None):  # `foreach` and `fused` may be None or a bool
        return
    if kind is not _kind(saved):
        yield _differs(path, saved, current)
    elif kind is Mapping and current:
        yield from (f"{path} {key} is not in it" for key in current.keys() - saved.keys())
        yield from (f"{path} {key} is not in this run" for key in saved.keys() - current.keys())
        for key in current.keys() & saved.keys():
            if key == "params" and isinstance(current[key], list) and current[key] != saved[key]:
                yield f"{path} has other parameters"
            elif not str(key).endswith(EXTRA_STATE):  # which the object itself refuses or takes
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
    """Yield an error if saved attributes of the user's functions are missing; additional ones are allowed."""
    is_good = isinstance(saved, list) and len(saved) == len(current)
    for mine, theirs in zip(current, saved if is_good else current, strict=True):
        is_good &= _kind(mine) is _kind(theirs) and (mine is None or mine.keys() <= theirs.keys())
    if not is_good:
        yield f"{path} are not of as many functions, or lack attributes"


def _is_alike(kind: object, current: Any, saved: Any) -> bool:
    """Tell whether a saved value can replace the current value of the same kind."""
    if kind is Counter:
        return all(_kind(number) is float for pair in saved.items() for number in pair)
    if kind is torch.Tensor and (current.dim() or not current.is_meta):
        return (current.shape, current.dtype) == (saved.shape, saved.dtype)
    if kind in (float, torch.Tensor):
        return _is_finite(saved) or not _is_finite(current)
    return True


def _fresh_states(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], parameters: list[torch.Tensor]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the states that one of torch's optimizers has after one step; empty where they are unknown.

    A new optimizer takes the step, with parameters on the meta device, which use no memory.
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
        with suppress(RuntimeError):  # some read a value, which meta tensors lack, after creating the states
            optimizer.step()
    except (TypeError, ValueError):  # the optimizer needs more than this, such as a closure
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
    # Torch does not accept longer integers.
    return value.bit_length() < 63 if isinstance(value, int) else math.isfinite(value)


def _differs(what: str, saved: object, current: object) -> str:
    return f"{what} is {_show(saved)} in it and {_show(current)} in this run"


def _size(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _show(value: object) -> str:
    if isinstance(value, torch.Tensor) and (value.dim() or value.is_meta):
        return _size(value)
    is_plain = isinstance(value, bool | int | float | str | torch.Tensor | None)
    return f"{value!r:.60}" if is_plain else f"a {type(value)}"


_KINDS = (bool, str, list, tuple, Counter, Mapping, torch.Tensor)
_USER_FUNCTIONS = "lr_lambdas"
"""The key under which LambdaLR saves the attributes of the user's function objects."""
