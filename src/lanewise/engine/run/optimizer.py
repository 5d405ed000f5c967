"""Builds the optimizer over the parameters of a model, and gives the model the weights to evaluate."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lanewise.config import ClassConfig, OptimizerConfig, RunConfig
from lanewise.config.check import suggest
from lanewise.config.classes import build
from lanewise.config.optimizer_rules import choose_implementation, closure_mistakes
from lanewise.config.scheduler import length_hint
from lanewise.engine.state.optimizer_shards import OptimizerShards
from lanewise.errors import ConfigError, TaskError
from lanewise.processes.device.nested import tensors_in
from lanewise.processes.device.random_state import generator_states
from lanewise.task import Task


def build_optimizer(config: RunConfig, task: Task, model: nn.Module) -> Optimizer:
    """Build the optimizer over the task's parameter groups.

    Raises:
        ConfigError: if the class is not an optimizer, or cannot be used for training here.
        TaskError: if a parameter of the optimizer is not in the model.
    """
    device_types = {parameter.device.type for parameter in model.parameters()}
    are_floats = all(parameter.is_floating_point() for parameter in model.parameters())
    section = choose_implementation(config, device_types, are_floats=are_floats)
    groups = parameter_groups(config.optimizer, task, model)
    optimizer: Optimizer = build_section("optimizer", section.of_class, groups)
    _require_usable(optimizer, config)
    parameters = set(model.parameters())
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter not in parameters:
            raise TaskError(
                f"a parameter of the optimizer, of shape {tuple(parameter.shape)}, is not in the model: "
                "its gradient would not be summed over the lanes, and it would not be saved. Make it part of "
                "the module that build_model returns."
            )
    if modes := _modes(optimizer):
        modes[0]()
    return optimizer


def parameter_groups(section: OptimizerConfig, task: Task, model: nn.Module) -> Iterable[Any]:
    """Return what the optimizer gets: what the task says, or the groups of the configuration.

    Raises:
        ConfigError: if both have groups, or one of the configuration is of no parameter.
    """
    if not section.parameter_groups:
        return task.parameter_groups(model)
    if getattr(task.parameter_groups, "__func__", None) is not Task.parameter_groups:
        raise ConfigError(
            f"optimizer.parameter_groups and {type(task).__name__}.parameter_groups both make groups of the "
            "parameters. Leave one of them out."
        )
    rest = {name: one for name, one in model.named_parameters() if one.requires_grad}
    names, groups, mistakes = list(rest), list[dict[str, Any]](), list[str]()
    parts = sorted({part for name in names for part in name.split(".")})
    for number, group in enumerate(section.parameter_groups):
        found = {pattern: [*filter(re.compile(pattern).search, names)] for pattern in group.patterns}
        own = [name for name in rest if any(name in of_pattern for of_pattern in found.values())]
        groups.append({**group.options, "params": [(name, rest.pop(name)) for name in own]})
        key = f"optimizer.parameter_groups.{number}"
        mistakes += [
            f"{key}: {pattern} is found in no name of a trained parameter. {suggest(pattern, parts)}"
            for pattern, of_pattern in found.items()
            if not of_pattern
        ]
        if not own and all(found.values()):
            mistakes.append(f"{key}: all parameters that it names are in groups before it. Leave it out.")
    if mistakes:
        raise ConfigError(*mistakes)
    return [*groups, {"params": [*rest.items()]}] if rest else groups


def _require_usable(optimizer: object, config: RunConfig) -> None:
    """Raise ConfigError if a function made no optimizer, or one cannot do what the configuration asks for."""
    section = config.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer.class_path: {section.class_path} made a {type(optimizer).__name__}. Name a function "
            "that returns a torch.optim.Optimizer."
        )
    mistakes = [*closure_mistakes(config, type(optimizer))]
    mistakes += [
        f"optimizer.parameter_groups.{number}: {type(optimizer).__name__} has no option {name}. "
        f"{suggest(name, optimizer.defaults)}"
        for number, group in enumerate(section.parameter_groups)
        for name in group.options
        if name not in optimizer.defaults
    ]
    if mistakes:
        raise ConfigError(*mistakes)


@contextmanager
def evaluation_weights(optimizer: Optimizer, shards: OptimizerShards | None) -> Iterator[None]:
    """Let an optimizer that has modes, as schedule-free ones have, give the model the weights to evaluate.

    Afterwards weights and state have the bytes with which training goes on: the optimizer's own way back
    rounds, so the training would depend on when it is evaluated and saved. Meanwhile there is a copy of them.

    Collective if there are shards: every rank must enter it.

    Args:
        optimizer: the optimizer of the model; one without `train` and `eval` changes nothing.
        shards: which process has the optimizer's state of which parameter; None: every process has all of it.
    """
    modes = _modes(optimizer)
    if modes is None:
        yield
        return
    train, evaluate = modes
    put_back = _take(optimizer)
    try:
        with nullcontext() if shards is None else shards.exchanging(optimizer):
            evaluate()
        yield
    finally:
        train()
        put_back()


def _modes(optimizer: Optimizer) -> tuple[Callable[[], object], Callable[[], object]] | None:
    """Return what puts an optimizer into training mode and into evaluation mode; None where it has none."""
    train, evaluate = (getattr(optimizer, name, None) for name in ("train", "eval"))
    return (train, evaluate) if callable(train) and callable(evaluate) else None


def refuse_draws(optimizer: Optimizer) -> None:
    """Let the first step with a gradient raise an error if the optimizer draws random numbers in it.

    For an optimizer that updates a part of the parameters on each process: it would draw fewer numbers there,
    and give them to other parameters, than on one device.
    """
    before: object = None
    num_open_steps, is_seen = 0, False

    def note(*_: Any) -> None:
        nonlocal before, num_open_steps
        if not num_open_steps:  # a step may call that of its base class, which has hooks too
            before = _states(optimizer)
        num_open_steps += 1

    def compare(*_: Any) -> None:
        nonlocal num_open_steps, is_seen
        if is_seen:  # torch does not let a hook remove itself
            return
        num_open_steps -= 1
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if num_open_steps or all(parameter.grad is None for parameter in parameters):
            return
        is_seen = True
        handle.remove()
        if before != _states(optimizer):
            raise ConfigError(
                f"optimizer.class_path: {type(optimizer).__name__} draws random numbers, and each process "
                "would draw others than one device, since it updates a part of the parameters. Leave "
                "distributed.shard_optimizer out, and use distributed.reducer=ddp."
            )

    handle = optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(compare)


def _states(optimizer: Optimizer) -> object:
    """Return the states of the default generators, and of those that the optimizer keeps."""
    kept = [value for holder in (vars(optimizer), *optimizer.param_groups) for value in holder.values()]
    own = [value.get_state().tolist() for value in kept if isinstance(value, torch.Generator)]
    return generator_states(), own


def _take(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores the parameters, groups and state of an optimizer as they are now."""
    held = [optimizer.state, *optimizer.param_groups, *optimizer.state.values()]
    contents = [(holder, dict(holder)) for holder in held if isinstance(holder, dict)]
    tensors = tensors_in([optimizer.param_groups, optimizer.state])
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back() -> None:
        for holder, content in contents:
            holder.clear()
            holder.update(content)
        with torch.no_grad():
            for tensor, copied in copies:
                tensor.copy_(copied)

    return put_back


def build_section(key: str, section: ClassConfig, argument: object) -> Any:
    """Build an object of a torch class; an error about a refused value, such as lr=-1, names the section.

    Raises:
        ConfigError: if the class is not of the type that the section needs, or refuses a value.
    """
    try:
        return build(key, section, argument)
    except ConfigError:
        raise
    except ValueError as error:
        hint = length_hint(str(error)) if key == "scheduler" else ""
        said = str(error).removesuffix(".")
        raise ConfigError(f"{key}: {section.class_path} refuses its arguments: {said}.{hint}") from error
