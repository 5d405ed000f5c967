"""Transforms are applied in order, before anything is hooked to the model or copied from it."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.config import ActivationCheckpointingConfig, CompileConfig, MemoryConfig
from lanewise.engine.run import build as model
from lanewise.engine.run.build import build_run
from lanewise.errors import TaskError
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import Smooth, configure

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


class Outer(nn.Sequential):
    """Takes the place of a model of any class, under the same names."""


def replace(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return Outer(*model)


def freeze_the_first(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    assert isinstance(model, Outer)  # it comes after `replace`
    next(model.parameters()).requires_grad_(False)
    return model


def rename(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return nn.Sequential(model)


class Misspelt(Smooth):
    """Has a method that nobody calls, and a helper beside the method that it is named after."""

    def eval_dataset(self) -> dict[str, Any]:
        return {}

    def losses(self) -> None:
        """Help `loss`."""

    parameter_group = staticmethod(list)


def test_methods_that_are_named_nearly_as_those_of_a_task_are_warned_of(caplog):
    build_run(configure(Misspelt, steps=1), LocalWorld(torch.device("cpu")))
    warnings = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert warnings == [
        "Misspelt.eval_dataset is not used: did you mean eval_datasets?",
        "Misspelt.parameter_group is not used: did you mean parameter_groups?",
    ]


class Stack(Smooth):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def build():
    config = configure(Stack)
    train = dataclasses.replace(config.train, ema_decay=0.9)
    memory = MemoryConfig(activation_checkpointing=ActivationCheckpointingConfig())
    transformed = dataclasses.replace(config, train=train, compile=CompileConfig(), memory=memory)
    return build_run(transformed, LocalWorld(torch.device("cpu")))


def test_the_reducer_and_the_average_get_what_the_last_one_returned(monkeypatch):
    monkeypatch.setattr(model, "compile_forwards", replace)
    monkeypatch.setattr(model, "checkpoint_activations", freeze_the_first)
    run = build()
    assert isinstance(run.training.model, Outer)
    assert isinstance(run.training.average.module, Outer)
    assert run.training.model.state_dict().keys() == Stack().build_model().state_dict().keys()
    assert run.reducer.model is run.training.model
    assert len(run.reducer.parameters) == 3


def test_one_that_renames_is_our_mistake(monkeypatch):
    monkeypatch.setattr(model, "compile_forwards", rename)
    monkeypatch.setattr(model, "checkpoint_activations", lambda model, *_, **__: model)
    with pytest.raises(AssertionError, match="a transform renamed parameters or buffers"):
        build()


class Compiled(Smooth):
    def build_model(self) -> nn.Module:
        return nn.Sequential(torch.compile(nn.Linear(3, 4)), nn.Linear(4, 1))


def test_a_module_that_build_model_compiled_is_refused():
    """Its weights were saved as 0._orig_mod.weight, which no plain model has."""
    with pytest.raises(TaskError, match=r"as 0\._orig_mod\.weight\. Return the plain one and set compile"):
        model.build_model(Compiled(), seed=0)


class Wrapped(Stack):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def build_model(self) -> nn.Module:
        return self.wrap(super().build_model())


@pytest.mark.parametrize(
    ("wrap", "what"),
    [
        (nn.DataParallel, "the model is distributed by DataParallel"),
        (lambda inner: nn.Sequential(nn.DataParallel(inner[0]), inner[1]), "module 0 of the model is"),
    ],
)
def test_a_model_that_is_distributed_already_is_refused(wrap, what):
    with pytest.raises(TaskError, match=f"{what}.*Give the plain module instead"):
        model.build_model(Wrapped(wrap), seed=0)


class CompilesItself(Stack):
    def build_model(self) -> nn.Module:
        plain = super().build_model()
        plain.compile()
        return plain


def test_one_that_compiles_itself_keeps_its_names():
    names = model.build_model(CompilesItself(), seed=0).state_dict().keys()
    assert names == Stack().build_model().state_dict().keys()
