"""What a run is besides its configuration: all that a checkpoint holds, by the names of parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lanewise.engine.evaluate import Evaluation
from lanewise.engine.step import Training
from lanewise.errors import CheckpointError


class RunState:
    """The model, its optimizer, and whatever else changes with the steps.

    There is no state of a loader and none of random generators: the step is enough for both. Nothing is
    stored by rank, and all of it is equal on every rank.

    Args:
        training: what is trained.
        evaluation: knows the best value so far; None where nothing is evaluated.
    """

    def __init__(self, training: Training, evaluation: Evaluation | None) -> None:
        self._training = training
        self._evaluation = evaluation

    def take(self) -> dict[str, Any]:
        """Return the state, whose tensors are those of the run, not copies."""
        training = self._training
        state: dict[str, Any] = {
            "model": training.model.state_dict(),
            "optimizer": take_optimizer(training.optimizer, dict(training.model.named_parameters())),
        }
        if training.scheduler is not None:
            state["scheduler"] = {"class": _class_of(training.scheduler), **training.scheduler.state_dict()}
        if training.precision.loss_scale is not None:
            state["loss_scale"] = training.precision.loss_scale.state_dict()
        if training.average is not None:
            state["average"] = training.average.state_dict()
        if self._evaluation is not None:
            state["best"] = {"best": self._evaluation.best_value, "last": self._evaluation.last_value}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `take` returned in another process, maybe on other devices.

        Raises:
            CheckpointError: lists everything that does not fit; then nothing was changed.
        """
        own = self.take()
        mistakes = [f"{name} is not in it" for name in own.keys() - state.keys()]
        mistakes += [f"it has a state of {name}, and this run has none" for name in state.keys() - own.keys()]
        for name in ("model", "average"):
            if name in own and name in state:
                mistakes += compare_modules(own[name], state[name], name)
        mistakes += compare_optimizers(own["optimizer"], state.get("optimizer", own["optimizer"]))
        mistakes += compare_schedulers(own.get("scheduler", {}), state.get("scheduler", {}))
        if mistakes:
            raise CheckpointError(f"the checkpoint is of another run: {'; '.join(sorted(mistakes))}.")
        training = self._training
        copy_state(training.model, state["model"])
        restore_optimizer(training.optimizer, state["optimizer"])
        if training.scheduler is not None:
            saved = {key: value for key, value in state["scheduler"].items() if key != "class"}
            training.scheduler.load_state_dict(saved)
        if training.precision.loss_scale is not None:
            training.precision.loss_scale.load_state_dict(state["loss_scale"])
        if training.average is not None:
            copy_state(training.average, state["average"])
        if self._evaluation is not None:
            self._evaluation.best_value = state["best"]["best"]
            self._evaluation.last_value = state["best"]["last"]


def take_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return an optimizer's state by the names of parameters."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    return {
        "class": _class_of(optimizer),
        "state": {names[parameter]: dict(values) for parameter, values in optimizer.state.items() if values},
        "groups": [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [names[parameter] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ],
    }


def compare_optimizers(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Say in what the groups of two optimizers differ: their parameters, and which options they have."""
    if own["class"] != saved.get("class"):
        return [f"the optimizer was a {saved.get('class')}, and is a {own['class']} now"]
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


def compare_schedulers(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Say in what two schedulers differ: their class, and those of the ones inside them."""
    if not own or not saved:
        return []
    if own["class"] != saved.get("class"):
        return [f"the scheduler was a {saved.get('class')}, and is a {own['class']} now"]
    inner_keys = [[set(one) for one in state.get("_schedulers", ())] for state in (own, saved)]
    if own.keys() != saved.keys() or inner_keys[0] != inner_keys[1]:
        return [f"the scheduler {own['class']} has other parts than in it"]
    return []


def restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer the state that `take_optimizer` returned; the groups must fit."""
    numbers: dict[str, int] = {}
    groups = []
    for group in saved["groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    for group, mine in zip(groups, optimizer.param_groups, strict=True):
        if "param_names" in mine:
            group["param_names"] = list(mine["param_names"])
    names = [name for group in saved["groups"] for name in group["params"]]
    own = dict(zip(names, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    state = {
        numbers[name]: {key: _laid_out(value, own[name]) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """Give a state its parameter's order in memory, by which fused optimizers go; files have none."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def compare_modules(own: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> Iterable[str]:
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


def copy_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy tensors into the module's own storage, and hand its extra state to `set_extra_state`."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if not name.endswith(_EXTRA_STATE):
                value.copy_(saved[name])
    extra = {name: value for name, value in saved.items() if name.endswith(_EXTRA_STATE)}
    if extra:
        module.load_state_dict(extra, strict=False)


_EXTRA_STATE = "_extra_state"
"""How the names end under which `get_extra_state` is in a state dict."""
