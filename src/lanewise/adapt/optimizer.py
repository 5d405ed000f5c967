"""An optimizer and a scheduler that were built already, as a run builds them anew."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lanewise.errors import ConfigError

_NOTED = "lanewise_learning_rates"
"""The attribute of a parameter by which `schedule`, which gets an optimizer alone, finds learning rates."""
_NO_OPTIONS = {"params", "param_names", "initial_lr", "foreach", "fused"}
"""Entries of a group that are no options of the user's: a run chooses the implementation itself."""


@final
class BuiltOptimizer:
    """The class, the options and the groups of an optimizer, and the learning rates that its scheduler sets.

    Args:
        optimizer: over parameters of the model, before its first step.
        scheduler: of the optimizer; None: the learning rate does not change.
        model: has the parameters.
        steps_per_value: after how many optimizer steps the scheduler is stepped.

    Raises:
        ConfigError: the optimizer has state already, has parameters that are not of the model, or cannot be
            built anew of its options; or the scheduler follows a metric.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: LRScheduler | None, model: nn.Module, steps_per_value: int = 1
    ) -> None:
        cls = type(optimizer)
        if optimizer.state:
            raise ConfigError(f"the {cls.__name__} has trained already. Build a new one, with a new model.")
        parameters = inspect.signature(cls).parameters
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._options = {
            name: value
            for name, value in _options(optimizer.defaults).items()
            if name in parameters and (name == "lr" or value != _plain(parameters[name].default))
        }
        self._groups = []
        for group in optimizer.param_groups:
            if foreign := [p for p in group["params"] if p not in names]:
                raise ConfigError(
                    f"the {cls.__name__} has a parameter of shape {tuple(foreign[0].shape)} that is not "
                    "the model's. Build it over the model's parameters."
                )
            defaults = _options(optimizer.defaults)
            own = {name: value for name, value in _options(group).items() if value != defaults.get(name)}
            self._groups.append(([names[parameter] for parameter in group["params"]], own))
        self._class = cls
        self._require_equal(optimizer, model)
        self._steps_per_value = steps_per_value
        self._rates = None if scheduler is None else _LearningRates(scheduler)

    @property
    def sections(self) -> dict[str, Any]:
        """The sections `optimizer` and `scheduler` of a configuration."""
        public = getattr(torch.optim, self._class.__name__, None) is self._class
        module = "torch.optim" if public else self._class.__module__
        optimizer = {"class_path": f"{module}.{self._class.__qualname__}", "init_args": self._options}
        if self._rates is None:
            return {"optimizer": optimizer}
        name = f"{__name__}.{schedule.__name__}"
        init_args = {"steps_per_value": self._steps_per_value}
        return {"optimizer": optimizer, "scheduler": {"class_path": name, "init_args": init_args}}

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups over the parameters of a model of the run, for `Task.parameter_groups`."""
        named = dict(model.named_parameters())
        groups = []
        for number, (names, options) in enumerate(self._groups):
            if names:  # Hugging Face's Trainer has a group for weight decay, even if it is empty
                groups.append({"params": [(name, named[name]) for name in names], **options})
                setattr(named[names[0]], _NOTED, (self._rates, number))
        return groups

    def _require_equal(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Raise ConfigError if the class makes another optimizer of the options that were read."""
        named = dict(model.named_parameters())
        given = [{"params": [named[name] for name in names], **own} for names, own in self._groups]
        try:
            made = self._class(given, **self._options)
        except (TypeError, ValueError) as error:
            raise ConfigError(_not_anew(self._class, str(error))) from error
        for group, again in zip(optimizer.param_groups, made.param_groups, strict=True):
            for name, value in _options(group).items():
                if _options(again).get(name) != value:
                    what = f"its {name} would be {again.get(name)!r:.40} in place of {value!r:.40}"
                    raise ConfigError(_not_anew(self._class, what))


def schedule(optimizer: Optimizer, steps_per_value: int = 1) -> LambdaLR:
    """Return a scheduler with the learning rates of the one that a `BuiltOptimizer` read.

    Args:
        optimizer: over the groups of `BuiltOptimizer.parameter_groups`.
        steps_per_value: after how many steps the scheduler that was read is stepped.
    """
    noted = [getattr(group["params"][0], _NOTED) for group in optimizer.param_groups]

    def factor_of(rates: "_LearningRates", number: int) -> Any:
        return lambda step: rates.factor(step // steps_per_value, number)

    return LambdaLR(optimizer, [factor_of(*of_group) for of_group in noted])


@final
class _LearningRates:
    """The learning rates of a scheduler after each number of its steps, relative to the first ones."""

    def __init__(self, scheduler: LRScheduler) -> None:
        required = [p for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty]
        if required:
            raise ConfigError(
                f"the {type(scheduler).__name__} is stepped with a metric. Give a section scheduler in its "
                'place: {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, and evaluate.best.'
            )
        if getattr(scheduler, "cycle_momentum", False):
            raise ConfigError(_more_than_rates(scheduler))
        self._scheduler = scheduler
        self._base = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
        self._others = self._not_rates()
        self._rows = [self._row()]

    def factor(self, num_steps: int, number: int) -> float:
        """Return the factor of a group's learning rate when the scheduler was stepped so many times."""
        while len(self._rows) <= num_steps:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # no optimizer steps in between
                self._scheduler.step()
            if self._not_rates() != self._others:
                raise ConfigError(_more_than_rates(self._scheduler))
            self._rows.append(self._row())
        return self._rows[num_steps][number]

    def _row(self) -> list[float]:
        groups = self._scheduler.optimizer.param_groups
        return [
            float(group["lr"]) / float(base) if base else 0.0
            for group, base in zip(groups, self._base, strict=True)
        ]

    def _not_rates(self) -> list[dict[str, Any]]:
        return [{**_options(group), "lr": None} for group in self._scheduler.optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, or of all, as a configuration holds them."""
    options = {name: _plain(value) for name, value in group.items() if name not in _NO_OPTIONS}
    if "initial_lr" in group:  # a scheduler has changed lr already
        options["lr"] = _plain(group["initial_lr"])
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _not_anew(cls: type, why: str) -> str:
    return (
        f"the {cls.__name__} cannot be built anew from its options: {why}. "
        "Return another optimizer, or train with a Task."
    )


def _more_than_rates(scheduler: LRScheduler) -> str:
    return (
        f"the {type(scheduler).__name__} changes more than learning rates, such as momentum. "
        "Give it cycle_momentum=False, or train with a Task."
    )
