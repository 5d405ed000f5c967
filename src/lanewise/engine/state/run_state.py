"""The state of a run that a checkpoint holds; parameters are identified by name."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lanewise.engine.precision import LossScale
from lanewise.engine.state.left_out import (
    changed_left_out,
    digests_left_out,
    left_out_mismatches,
    restore_left_out,
)
from lanewise.engine.state.mismatch import CLASS, EXTRA_STATE, kind_mismatches, optimizer_mismatches
from lanewise.engine.state.optimizer_shards import OptimizerShards
from lanewise.errors import CheckpointError
from lanewise.processes.world.encode import TensorTable, encode
from lanewise.processes.world.shards import is_sharded, laid_out_as
from lanewise.runs.checkpoint.model_file import grow_buffers, grown_buffers

LEFT_OUT = "lanewise_buffers"
"""The key of the buffers that the state dict of a module leaves out, by the key of the module."""
_Load = tuple[str, Callable[[Any], object], Mapping[str, Any], Mapping[str, Any]]
"""Key of an object, the function that loads a state into it, its present state, and the saved one."""


@final
class RunState:
    """The objects that change with the steps, each under a name: the model, its optimizer and others.

    Of the buffers that the state dict of a module leaves out it has those that are no longer what they were
    when this was constructed. The loader and the random generators have no state here, since both follow from
    the step. Nothing is stored by rank, and everything but sharded and held tensors is equal on every rank.

    Collective where an optimizer's state is sharded: every rank must call every method.

    Args:
        objects: modules, optimizers of their parameters, schedulers, and other objects with `state_dict` and
            `load_state_dict`; None is left out.
        may_lack: names of objects that older checkpoints may lack, and which then stay as they are.
        shards: which process has the optimizer's state of which parameter; None: every process has all of it.
        digests: what `digests_left_out` returned of modules that are no longer new, when they were.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        may_lack: Collection[str] = (),
        shards: OptimizerShards | None = None,
        digests: Mapping[nn.Module, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self._objects = {key: value for key, value in objects.items() if value is not None}
        self._digests = {
            key: digests[value] if value in digests else digests_left_out(value)
            for key, value in self._objects.items()
            if isinstance(value, nn.Module)
        }
        self._may_lack = frozenset(may_lack)
        self._shards = shards
        self._names: dict[torch.Tensor, str] = {
            parameter: f"{key}.{name}"
            for key, value in self._objects.items()
            if isinstance(value, nn.Module)
            for name, parameter in value.named_parameters()
        }

    def take(self) -> dict[str, Any]:
        """Return the state; its tensors are those of the run, not copies."""
        state = {key: self._take(value) for key, value in self._objects.items()}
        left_out = {
            key: changed_left_out(self._objects[key], digests) for key, digests in self._digests.items()
        }
        changed = {key: buffers for key, buffers in left_out.items() if buffers}
        return state | ({LEFT_OUT: changed} if changed else {})

    def require_savable(self) -> None:
        """Raise an error before training if the state cannot be saved, rather than at the first save.

        The states of the optimizer's parameters are not checked: before the first step there are none.

        Raises:
            CheckpointError: names the value that cannot be saved.
        """
        for key, value in self._objects.items():
            if not hasattr(value, "state_dict"):
                raise CheckpointError(
                    f"{key} is {value!r:.80}, which has no state_dict: only modules, optimizers and other "
                    "objects with state_dict and load_state_dict are saved. Keep a number in such an object; "
                    "epoch and step follow from the checkpoint's step."
                )
            for name, module in value.named_modules(prefix=key) if isinstance(value, nn.Module) else ():
                of = type(module)
                can_load = of.set_extra_state is not nn.Module.set_extra_state
                if of.get_extra_state is not nn.Module.get_extra_state and not can_load:
                    raise CheckpointError(
                        f"{name} ({of.__name__}) has get_extra_state and no set_extra_state, so what it "
                        "saves could not be restored. Add set_extra_state."
                    )
        tensors = TensorTable()
        for key, value in self.take().items():
            encode(value, key, tensors)

    def compare(self, state: Mapping[str, Any]) -> list[str]:
        """Return the mismatches with a state that `take` returned, in another process or on other devices."""
        current = {key: self._take(value) for key, value in self._objects.items()}
        state = {**state}
        mistakes = self._compare_left_out(state.pop(LEFT_OUT, {}))
        mistakes += [f"{key} is not in it" for key in current.keys() - state.keys() - self._may_lack]
        mistakes += [
            f"it has a state of {key}, and this run has none" for key in state.keys() - current.keys()
        ]
        for key in current.keys() & state.keys():
            mistakes += self._compare(key, current[key], state[key])
        return sorted(mistakes)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the objects from a state in which `compare` found no mismatch.

        Raises:
            CheckpointError: if an object does not accept its state. If the object is not an optimizer, the
                objects that were already loaded get their present states back.
        """
        objects = {key: value for key, value in self._objects.items() if key in state}
        loads = [load for key, value in objects.items() for load in _loads(key, value, state[key])]
        for number, (key, load, _, saved) in enumerate(loads):
            try:
                with _loading(key):
                    load(saved)
            except CheckpointError:
                for _, load_back, before, _ in loads[: number + 1]:
                    with suppress(Exception):  # one that accepts no state, as it just said
                        load_back(before)
                raise
        for key, value in objects.items():
            if isinstance(value, nn.Module):
                _copy(value, state[key])
                restore_left_out(value, state.get(LEFT_OUT, {}).get(key, {}))
            elif isinstance(value, Optimizer):
                with _loading(key):
                    restore_optimizer(value, state[key], self._shards)

    def _compare(self, key: str, current: Mapping[str, Any], saved: object) -> Iterable[str]:
        value = self._objects[key]
        if not isinstance(saved, Mapping):
            return (f"{key} is a {type(saved)} in it",)
        if isinstance(value, Optimizer | LRScheduler) and current[CLASS] != saved.get(CLASS):
            return (f"the {key} was a {saved.get(CLASS)}, and is a {current[CLASS]} now",)
        if isinstance(value, nn.Module):
            return kind_mismatches({**current, **grown_buffers(value, saved)}, saved, key)
        if isinstance(value, Optimizer):
            return optimizer_mismatches(value, current, saved, self._names, key)
        return kind_mismatches(current, saved, key) if isinstance(value, LRScheduler | LossScale) else ()

    def _compare_left_out(self, saved: object) -> list[str]:
        if not isinstance(saved, Mapping) or saved.keys() - self._digests.keys():
            return [f"it has {LEFT_OUT} of other modules than this run"]
        return [
            mistake for key in saved for mistake in left_out_mismatches(self._objects[key], saved[key], key)
        ]

    def _take(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Optimizer):
            taken = take_optimizer(value, self._names)
            return taken if self._shards is None else self._shards.complete(taken)
        state: dict[str, Any] = value.state_dict()
        return {CLASS: _class_of(value), **state} if isinstance(value, LRScheduler) else state


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
        CLASS: _class_of(optimizer),
        # An entry for each parameter, so that a missing one is noticed.
        "state": {names[parameter]: dict(optimizer.state.get(parameter, {})) for parameter in parameters},
        "groups": [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [names[parameter] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ],
    }


def restore_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], shards: OptimizerShards | None = None
) -> None:
    """Load this process's part of a state that `take_optimizer` returned; the groups must fit."""
    names = [name for group in saved["groups"] for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number_of[name]: {key: _laid_out(value, parameters[number_of[name]]) for key, value in values.items()}
        for name, values in saved["state"].items()
        if values and (shards is None or shards.updates(parameters[number_of[name]]))
    }
    groups = [{**group, "params": [number_of[name] for name in group["params"]]} for group in saved["groups"]]
    for group, mine in zip(groups, optimizer.param_groups, strict=True):
        if "param_names" in mine:
            group["param_names"] = list(mine["param_names"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """Return a state tensor, placed and strided like its parameter; fused optimizers need equal strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return laid_out_as(value, parameter) if value.shape == parameter.shape else value.clone()


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@contextmanager
def _loading(key: str) -> Iterator[None]:
    """Turn any error of an object that loads its state into a CheckpointError, if it is none."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{key} does not accept its state: {error!r:.200}.") from error


def _loads(key: str, value: Any, saved: Mapping[str, Any]) -> Iterator[_Load]:
    """Yield the parts of an object's state that its own code loads, and may refuse."""
    if isinstance(value, nn.Module):
        if extra := _extra(saved):
            present = deepcopy(_extra(value.state_dict()))
            yield key, partial(value.load_state_dict, strict=False), present, extra
    elif not isinstance(value, Optimizer):
        plain = {name: part for name, part in saved.items() if name != CLASS}
        yield key, value.load_state_dict, deepcopy(value.state_dict()), plain


def _copy(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy saved tensors into the module's own tensors."""
    grow_buffers(module, saved)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if not name.endswith(EXTRA_STATE):
                value.copy_(laid_out_as(saved[name], value) if is_sharded(value) else saved[name])


def _extra(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.endswith(EXTRA_STATE)}
