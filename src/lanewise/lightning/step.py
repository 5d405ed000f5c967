"""Calls the steps of a LightningModule as a trainer does, and takes what they log."""

import copy
from enum import Enum
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import nn
from torchmetrics import Metric

from lanewise.errors import TaskError
from lanewise.metrics import MetricStates, set_aside

LOGGED = "lanewise_logged"
"""The attribute of a module that collects what a step logs; afterwards it has the torchmetrics by name."""


class StepKind(Enum):
    """What a call of a prepared module calls, given first: then come the batch and its number of samples."""

    TRAINING = "training_step"
    VALIDATION = "validation_step"


class Stepped(NamedTuple):
    """What a step gave."""

    returned: Any
    values: dict[str, tuple[Any, Any]]
    """What it logged, by name: a value and its weight."""
    states: MetricStates
    """What the torchmetrics that it logged counted in it."""


@final
class TrainerThere:
    """Stands for the trainer that the module asks; what depends on the devices is not there.

    Args:
        known: what it may be asked.
    """

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise TaskError, as this is called for what is not known."""
        if name.startswith("__"):  # pickle and copy look for methods
            raise AttributeError(name)
        raise TaskError(
            f"the LightningModule asks for trainer.{name}, which nothing here has. Leave it out, or write a "
            "Task."
        )


@final
class _NoIndex:
    """Stands for the index of a batch, of which there is none that is the same on any number of devices."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise TaskError(
            "the step of the LightningModule uses batch_idx, which depends on the number of devices. Leave "
            "it out."
        )

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __floordiv__ = __add__ = __sub__ = _refuse
    __mul__ = __truediv__ = __and__ = __pow__ = __neg__ = __radd__ = __rsub__ = __rmul__ = _refuse
    __rtruediv__ = __bool__ = __int__ = __index__ = __float__ = __hash__ = __str__ = __format__ = _refuse


def prepared(module: nn.Module, trainer: TrainerThere) -> Any:
    """Return a copy of a module to call with a `StepKind`; any other call does what it did."""
    made: Any = copy.deepcopy(module)
    made.trainer = trainer
    made.forward = MethodType(_forward, made)
    made.log = MethodType(_log, made)
    for metric in _metrics_in(made):
        metric.sync_on_compute = False  # a lane is alone
    return made


def _metrics_in(module: nn.Module) -> list[Metric]:
    """Return the torchmetrics that a module holds."""
    return [part for part in module.modules() if isinstance(part, Metric)]


def _forward(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(step, StepKind):
        return type(self).forward(self, step, *args, **kwargs)
    batch, num_samples = args
    held = _metrics_in(self)
    for metric in held:
        metric.reset()
    logged: dict[str, Any] = {}
    setattr(self, LOGGED, logged)
    batch = self.on_after_batch_transfer(self.on_before_batch_transfer(batch, 0), 0)
    method = getattr(self, step.value)
    returned = method(batch, *([_NoIndex()] if len(signature(method).parameters) > 1 else []))
    values: dict[str, tuple[Any, Any]] = {}
    states: MetricStates = {}
    for name, (value, weight) in logged.items():
        if isinstance(value, Metric) and step is StepKind.VALIDATION:
            states[name] = set_aside(value)
        else:
            found = value.compute() if isinstance(value, Metric) else value
            number = found.detach() if isinstance(found, torch.Tensor) else float(found)
            values[name] = (number, num_samples if weight is None else weight)
    for metric in held:
        metric.reset()
    setattr(self, LOGGED, {name: value for name, (value, _) in logged.items() if isinstance(value, Metric)})
    return Stepped(returned, values, states)


def _log(  # the signature of LightningModule.log, as far as it matters
    self: Any, name: str, value: Any, *_: Any, batch_size: Any = None, reduce_fx: Any = "mean", **__: Any
) -> None:
    if reduce_fx not in ("mean", torch.mean):
        raise TaskError(
            f"self.log({name!r}) has reduce_fx {reduce_fx!r:.40}, and what a step logs is a mean. Leave it "
            "out, or log a torchmetric."
        )
    getattr(self, LOGGED)[name] = (value, batch_size)
