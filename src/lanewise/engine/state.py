"""What a run is besides its configuration: all that a checkpoint holds, by the names of parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lanewise.checkpoint.encode import TensorTable, encode
from lanewise.errors import CheckpointError
from lanewise.world.shards import is_sharded, laid_out_as


class RunState:
    """Whatever changes with the steps: the model, its optimizer and the like, each under a name.

    There is no state of a loader and none of random generators: the step is enough for both. Nothing is
    stored by rank, and all of it is equal on every rank, but for sharded tensors: each rank has its part.

    Args:
        objects: modules, optimizers of their parameters, schedulers, and whatever else has `state_dict` and
            `load_state_dict`; those that are None are left out.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {key: value for key, value in objects.items() if value is not None}
        self._names: dict[torch.Tensor, str] = {
            parameter: f"{key}.{name}"
            for key, value in self._objects.items()
            if isinstance(value, nn.Module)
            for name, parameter in value.named_parameters()
        }

    def take(self) -> dict[str, Any]:
        """Return the state, whose tensors are those of the run, not copies."""
        return {key: self._take(value) for key, value in self._objects.items()}

    def require_savable(self) -> None:
        """Raise now what would make a save fail: a run must not learn it from its first checkpoint.

        An optimizer has no state of its own yet before its first step; all else is known.

        Raises:
            CheckpointError: names what cannot be saved.
        """
        tensors = TensorTable()
        for key, value in self.take().items():
            encode(value, key, tensors)

    def compare(self, state: Mapping[str, Any]) -> list[str]:
        """Say what does not fit in what `take` returned in another process, maybe on other devices."""
        own = self.take()
        mistakes = [f"{key} is not in it" for key in own.keys() - state.keys()]
        mistakes += [f"it has a state of {key}, and this run has none" for key in state.keys() - own.keys()]
        for key in own.keys() & state.keys():
            mistakes += _compare(self._objects[key], own[key], state[key], key)
        return sorted(mistakes)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, which must fit."""
        for key, value in self._objects.items():
            if isinstance(value, nn.Module):
                _copy(value, state[key])
            elif isinstance(value, Optimizer):
                restore_optimizer(value, state[key])
            else:
                value.load_state_dict({name: one for name, one in state[key].items() if name != _CLASS})

    def _take(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Optimizer):
            return take_optimizer(value, self._names)
        state: dict[str, Any] = value.state_dict()
        return {_CLASS: _class_of(value), **state} if isinstance(value, LRScheduler) else state


def _compare(value: Any, own: Mapping[str, Any], saved: Mapping[str, Any], key: str) -> Iterable[str]:
    if isinstance(value, nn.Module):
        return _compare_modules(own, saved, key)
    if isinstance(value, Optimizer):
        return _compare_optimizers(own, saved)
    return _compare_schedulers(own, saved) if isinstance(value, LRScheduler) else ()


def take_optimizer(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """Return an optimizer's state by the names of its parameters.

    Raises:
        CheckpointError: if a parameter has no name.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if nameless := [tuple(parameter.shape) for parameter in parameters if parameter not in names]:
        raise CheckpointError(
            f"a parameter of the optimizer, of shape {nameless[0]}, is in none of the saved modules. "
            "Save its module as well."
        )
    return {
        _CLASS: _class_of(optimizer),
        "state": {names[parameter]: dict(values) for parameter, values in optimizer.state.items() if values},
        "groups": [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [names[parameter] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ],
    }


def _compare_optimizers(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Say in what the groups of two optimizers differ: their parameters, and which options they have."""
    if own[_CLASS] != saved.get(_CLASS):
        return [f"the optimizer was a {saved.get(_CLASS)}, and is a {own[_CLASS]} now"]
    if len(own["groups"]) != len(saved["groups"]):
        return [f"optimizer has {len(saved['groups'])} groups in it and {len(own['groups'])} in this run"]
    mistakes = []
    for number, (mine, theirs) in enumerate(zip(own["groups"], saved["groups"], strict=True)):
        if mine["params"] != theirs["params"]:
            mistakes.append(f"group {number} of the optimizer has other parameters")
        if mine.keys() != theirs.keys():
            differing = ", ".join(sorted(mine.keys() ^ theirs.keys()))
            mistakes.append(f"the optimizer is another one: its options {differing}")
    return mistakes


def _compare_schedulers(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Say in what two schedulers differ: their class, and those of the ones inside them."""
    if own[_CLASS] != saved.get(_CLASS):
        return [f"the scheduler was a {saved.get(_CLASS)}, and is a {own[_CLASS]} now"]
    inner_keys = [[set(one) for one in state.get("_schedulers", ())] for state in (own, saved)]
    if own.keys() != saved.keys() or inner_keys[0] != inner_keys[1]:
        return [f"the scheduler {own[_CLASS]} has other parts than in it"]
    return []


def restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer the state that `take_optimizer` returned; the groups must fit."""
    names = [name for group in saved["groups"] for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number_of[name]: {key: _laid_out(value, parameters[number_of[name]]) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    groups = [{**group, "params": [number_of[name] for name in group["params"]]} for group in saved["groups"]]
    for group, mine in zip(groups, optimizer.param_groups, strict=True):
        if "param_names" in mine:
            group["param_names"] = list(mine["param_names"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """Give a state its parameter's order in memory, by which fused optimizers go; files have none."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return laid_out_as(value, parameter)


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _compare_modules(own: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> Iterable[str]:
    """Say in what the states of two modules differ: their names, shapes and dtypes."""
    for name in own.keys() - saved.keys():
        yield f"{what} {name} is not in it"
    for name in saved.keys() - own.keys():
        yield f"{what} {name} is not in this run"
    for name in own.keys() & saved.keys():
        mine, theirs = own[name], saved[name]
        if name.endswith(_EXTRA_STATE):
            continue
        if isinstance(mine, torch.Tensor) != isinstance(theirs, torch.Tensor):
            yield f"{what} {name} is no tensor in one of them"
        elif isinstance(mine, torch.Tensor) and (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            yield (
                f"{what} {name} is {tuple(theirs.shape)} of {theirs.dtype} in it "
                f"and {tuple(mine.shape)} of {mine.dtype} in this run"
            )


def _copy(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy tensors into the module's own storage, and hand its extra state to `set_extra_state`."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if not name.endswith(_EXTRA_STATE):
                value.copy_(laid_out_as(saved[name], value) if is_sharded(value) else saved[name])
    extra = {name: value for name, value in saved.items() if name.endswith(_EXTRA_STATE)}
    if extra:
        module.load_state_dict(extra, strict=False)


_CLASS = "class"
_EXTRA_STATE = "_extra_state"
"""How the names end under which `get_extra_state` is in a state dict."""
