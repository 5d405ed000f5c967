"""Classes are checked against their signatures, every mistake at once, and built with converted arguments."""

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lanewise.config import (
    BatchConfig,
    ClassConfig,
    DataConfig,
    OptimizerConfig,
    OrderConfig,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
)
from lanewise.config import classes as stage_two
from lanewise.config.classes import build, check_classes, describe_classes
from lanewise.errors import ConfigError
from lanewise.testing import run_distributed


class Encoder:
    def __init__(self, depth: int, name: str = "encoder") -> None:
        self.depth = depth
        self.name = name


@dataclass
class Shape:
    height: int
    width: int = 2


class Task:
    """A task.

    Args:
        width: channels of the
            first layer.
    """

    def __init__(  # noqa: PLR0917
        self,
        width: int = 1,
        folder: Path = Path(),
        encoder: Encoder | None = None,
        mode: Literal["fast", "slow"] = "fast",
        scale: tuple[float, float] = (0.0, 1.0),
        title: str | None = None,
        anything: Any = None,
        untyped=None,
        table: dict | None = None,
        shape: Shape | None = None,
        activation: Callable[[], Encoder] | None = None,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if name != "self"}


class Demanding:
    def __init__(self, typed: int, untyped, optional: str | None) -> None:
        self.given = (typed, untyped, optional)


class Parent:
    def __init__(self, depth: int, name: str = "parent") -> None:
        self.depth = depth


class Child(Parent):
    def __init__(self, width: float, **kwargs) -> None:
        super().__init__(**kwargs)
        self.width = width


class Open:
    def __init__(self, **options) -> None:
        self.options = options


class Optimizer:
    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.params, self.lr, self.betas = params, lr, betas


class Scheduler:
    def __init__(self, optimizer: Optimizer, num_steps: int) -> None:
        self.optimizer, self.num_steps = optimizer, num_steps


class Exploding:
    def __init__(self, width: int = 1) -> None:
        raise RuntimeError("this class was built")


KINDS = dict(stage_two._KINDS)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Let a class_path reach this file, which pytest imports under no plain name; any class will do."""
    monkeypatch.setitem(sys.modules, "here", sys.modules[__name__])
    anything = {key: stage_two._Kind("builtins.object", kind.num_runtime_args) for key, kind in KINDS.items()}
    monkeypatch.setattr(stage_two, "_KINDS", anything)


def config(name: str, **init_args: Any) -> ClassConfig:
    return ClassConfig(class_path=f"here.{name}", init_args=init_args)


def as_value(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"here.{name}", "init_args": init_args}


def run_config(task: ClassConfig, **changes: Any) -> RunConfig:
    if scheduler := changes.get("scheduler"):
        changes["scheduler"] = SchedulerConfig(**vars(scheduler))
    optimizer = OptimizerConfig(**vars(changes.pop("optimizer", config("Optimizer"))))
    sections: dict[str, Any] = {
        "task": task,
        "batch": BatchConfig(global_batch_size=1, micro_batch_size=1),
        "train": TrainConfig(run_dir="r", epochs=1),
        "optimizer": optimizer,
    }
    return RunConfig(**{**sections, **changes})


def mistakes_of(task: ClassConfig, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_classes(run_config(task, **changes))
    assert all("\n" not in mistake for mistake in caught.value.mistakes)
    return list(caught.value.mistakes)


@pytest.mark.parametrize(
    ("name", "value", "built"),
    [
        ("width", 3, 3),
        ("folder", "a/b", Path("a/b")),
        ("scale", [1, 2], (1.0, 2.0)),
        ("mode", "slow", "slow"),
        ("title", None, None),
        ("title", "null", "null"),
        ("title", "123", "123"),
        ("anything", "1e-3", "1e-3"),
        ("anything", {"a": [1, "2"]}, {"a": [1, "2"]}),
        ("untyped", "true", "true"),
        ("untyped", [1, None], [1, None]),
        ("table", {"a.b": 1, "class_path": "x"}, {"a.b": 1, "class_path": "x"}),
        ("shape", {"height": 4}, Shape(4, 2)),
    ],
)
def test_values_are_converted_to_the_types_of_the_signature(name, value, built):
    task = config("Task", **{name: value})
    check_classes(run_config(task))
    given = build("task", task).given[name]
    assert given == built
    assert type(given) is type(built)


@pytest.mark.parametrize("name", ["encoder", "anything", "untyped"])
def test_an_object_inside_an_argument_is_built(name):
    task = config("Task", **{name: as_value("Encoder", depth=3)})
    check_classes(run_config(task))
    encoder = build("task", task).given[name]
    assert (type(encoder), encoder.depth, encoder.name) == (Encoder, 3, "encoder")


def test_a_factory_is_built_for_a_callable_that_returns_a_class():
    task = config("Task", activation=as_value("Encoder", depth=3))
    check_classes(run_config(task))
    assert build("task", task).given["activation"]().depth == 3


@pytest.mark.parametrize(
    ("name", "value", "needed", "shown"),
    [
        ("width", "3", "int", '"3", which is text'),
        ("width", 3.5, "int", "3.5"),
        ("width", True, "int", "true"),
        ("width", None, "int", "null"),
        ("mode", None, "Literal['fast', 'slow']", "null"),
        ("scale", None, "tuple[float, float]", "null"),
        ("folder", 3, "pathlib.Path", "3"),
        ("scale", [1], "tuple[float, float]", "[1]"),
        ("scale", [1, "x"], "tuple[float, float]", '[1, "x"]'),
        ("mode", "medium", "Literal['fast', 'slow']", '"medium", which is text'),
        ("title", 3, "str | None", "3"),
    ],
)
def test_a_value_of_the_wrong_type(name, value, needed, shown):
    assert mistakes_of(config("Task", **{name: value})) == [
        f"task.init_args.{name} must be {needed}: got {shown}. lanewise train CONFIG --help describes it."
    ]


def test_an_unknown_argument_suggests_the_nearest_or_all():
    assert mistakes_of(config("Task", widht=3)) == [
        "task.init_args.widht is not an argument of here.Task. Did you mean task.init_args.width?"
    ]
    (mistake,) = mistakes_of(config("Encoder", depth=1, zzz=3))
    assert mistake == "task.init_args.zzz is not an argument of here.Encoder. Valid here: depth, name."


def test_missing_arguments_with_or_without_a_type():
    assert mistakes_of(config("Demanding")) == [
        "task.init_args.typed is missing: here.Demanding needs it (int). Add it.",
        "task.init_args.untyped is missing: here.Demanding needs it (any). Add it.",
        "task.init_args.optional is missing: here.Demanding needs it (str | None). Add it.",
    ]
    assert build("task", config("Demanding", typed=1, untyped="a", optional=None)).given == (1, "a", None)


def test_mistakes_in_an_object_inside_an_argument():
    bad = as_value("Encoder", depth="x", nmae="y")
    expected = [
        'depth must be int: got "x", which is text. lanewise train CONFIG --help describes it.',
        "nmae is not an argument of here.Encoder. Did you mean ",
    ]
    for name in ("encoder", "anything", "untyped"):
        prefix = f"task.init_args.{name}.init_args."
        mistakes = mistakes_of(config("Task", **{name: bad}))
        assert mistakes == [f"{prefix}{expected[0]}", f"{prefix}{expected[1]}{prefix}name?"]


def test_an_object_of_the_wrong_class():
    (mistake,) = mistakes_of(config("Task", encoder=as_value("Open")))
    assert mistake.startswith("task.init_args.encoder must be ")
    assert 'got {"class_path": "here.Open"' in mistake


def test_an_object_with_an_unknown_key():
    (mistake,) = mistakes_of(config("Task", anything={"class_path": "here.Encoder", "args": {}}))
    assert mistake.startswith("task.init_args.anything.args is not a key of task.init_args.anything.")


def test_arguments_of_parent_classes_are_known():
    (mistake,) = mistakes_of(config("Child", width=1, depth="deep"))
    assert mistake.startswith("task.init_args.depth must be int")
    (mistake,) = mistakes_of(config("Child", width=1))
    assert mistake.startswith("task.init_args.depth is missing")
    child = build("task", config("Child", width=1, depth=2))
    assert (child.width, child.depth) == (1.0, 2)


def test_free_keyword_arguments_take_any_name_and_objects_too():
    task = config("Open", a="1", b=[2], c=as_value("Encoder", depth=3))
    check_classes(run_config(task))
    options = build("task", task).options
    assert options["a"] == "1"
    assert options["b"] == [2]
    assert options["c"].depth == 3


def test_first_arguments_are_given_at_run_time():
    optimizer = build("optimizer", config("Optimizer", betas=[0.5, 0.9]), ["weights"])
    assert (optimizer.params, optimizer.lr, optimizer.betas) == (["weights"], 1e-3, (0.5, 0.9))
    scheduler = build("scheduler", config("Scheduler", num_steps=3), optimizer)
    assert (scheduler.optimizer, scheduler.num_steps) == (optimizer, 3)


def test_an_argument_of_the_run_cannot_stand_in_the_configuration():
    assert mistakes_of(config("Task"), optimizer=config("Optimizer", params=[1])) == [
        "optimizer.init_args.params is given to here.Optimizer at run time. Remove the key."
    ]


def test_mistakes_of_all_sections_come_at_once():
    mistakes = mistakes_of(
        config("Task", widht=3, scale=3),
        optimizer=config("Optimizer", lr="fast", beta=[1, 2]),
        scheduler=ClassConfig(class_path="here.Schedule"),
    )
    assert [mistake.split(" ")[0] for mistake in mistakes] == [
        "task.init_args.widht",
        "task.init_args.scale",
        "optimizer.init_args.lr",
        "optimizer.init_args.beta",
        "scheduler.class_path:",
    ]


def test_a_scheduler_is_checked():
    (mistake,) = mistakes_of(config("Task"), scheduler=config("Scheduler"))
    assert mistake.startswith("scheduler.init_args.num_steps is missing")


def test_the_length_that_a_scheduler_lacks_may_be_auto():
    cosine = ClassConfig(class_path="torch.optim.lr_scheduler.CosineAnnealingLR")
    (mistake,) = mistakes_of(config("Task"), scheduler=cosine)
    assert mistake.endswith("needs it (int). Add it. T_max: auto is the length of the run.")


def test_a_misspelt_field_of_a_dataclass_is_named_and_the_help_lists_them():
    assert mistakes_of(config("Task", shape={"height": 1, "wdith": 3})) == [
        "task.init_args.shape.wdith is not a field of Shape. Did you mean task.init_args.shape.width?"
    ]
    shown = describe_classes(run_config(config("Task")))
    assert "  --task.init_args.shape.height  int, required\n" in shown
    assert "  --task.init_args.shape.width  int, default 2\n" in shown


def test_checking_builds_nothing():
    check_classes(run_config(config("Task", anything=as_value("Exploding"), untyped=as_value("Exploding"))))
    check_classes(run_config(config("Exploding", width=3)))
    with pytest.raises(RuntimeError, match="this class was built"):
        build("task", config("Exploding", width=3))


def test_a_class_of_another_kind_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    """subprocess.Popen is a class: to build it, and then find that it is no task, would run the command."""
    monkeypatch.setattr(stage_two, "_KINDS", KINDS)
    command = ClassConfig(
        class_path="subprocess.Popen", init_args={"args": ["touch", str(tmp_path / "it_ran")]}
    )
    order = OrderConfig(class_path=command.class_path, init_args=command.init_args)
    mistakes = mistakes_of(
        command, optimizer=command, scheduler=command, data=DataConfig(order=order), callbacks=(command,)
    )
    assert [mistake.partition(" Name")[0] for mistake in mistakes] == [
        f"{key}.class_path must name a {kind.class_path}: subprocess.Popen is not one."
        for key, kind in (
            ("task", KINDS["task"]),
            ("optimizer", KINDS["optimizer"]),
            ("scheduler", KINDS["scheduler"]),
            ("data.order", KINDS["data"]),
            ("callbacks.0", KINDS["callbacks"]),
        )
    ]
    for key in KINDS:
        with pytest.raises(ConfigError, match=r"subprocess\.Popen is not one"):
            build(key, command)
    assert list(tmp_path.iterdir()) == []


def test_an_abstract_class_is_refused_before_its_arguments_are_built(monkeypatch):
    monkeypatch.setattr(stage_two, "_KINDS", KINDS)
    abstract = ClassConfig(class_path="lanewise.Task", init_args={"x": as_value("Exploding")})
    with pytest.raises(ConfigError, match=r"lanewise.Task does not define build_model, .* Add it to"):
        build("task", abstract)


@pytest.mark.parametrize(
    ("key", "class_path", "why"),
    [
        ("optimizer", "torch.optim.SparseAdam", "It takes sparse gradients only"),
    ],
)
def test_what_training_cannot_use_is_refused_before_a_process_starts(monkeypatch, key, class_path, why):
    monkeypatch.setattr(stage_two, "_KINDS", KINDS)
    sections = {
        "optimizer": OptimizerConfig(class_path="torch.optim.SGD"),
        key: ClassConfig(class_path=class_path),
    }
    with pytest.raises(ConfigError, match=f"{key}.class_path: {class_path} cannot be used. {why}"):
        check_classes(run_config(config("Task"), **sections), has_task=True)


def test_build_checks_too():
    with pytest.raises(ConfigError) as caught:
        build("task", config("Task", width="3", zzz=1))
    assert [mistake.split(" ")[0] for mistake in caught.value.mistakes] == [
        "task.init_args.width",
        "task.init_args.zzz",
    ]


def test_objects_do_not_share_values_with_the_configuration():
    task = config(
        "Task", untyped=[1], anything={"a": []}, table={"b": []}, encoder=as_value("Encoder", depth=1)
    )
    before = copy.deepcopy(task)
    given = build("task", task).given
    given["untyped"].append(2)
    given["anything"]["a"].append(2)
    given["table"]["b"].append(2)
    assert task == before


def test_a_class_without_a_signature():
    (mistake,) = mistakes_of(ClassConfig(class_path="builtins.dict"))
    assert mistake.startswith("task.class_path: builtins.dict does not declare its arguments.")


def test_the_help_lists_key_type_default_and_description():
    text = describe_classes(run_config(config("Task"), scheduler=config("Scheduler")))
    assert "task: here.Task\n" in text
    assert "  --task.init_args.width  int, default 1\n      channels of the first layer.\n" in text
    assert "  --task.init_args.untyped  any, default None\n" in text
    assert "  --optimizer.init_args.betas  tuple[float, float], default (0.9, 0.999)\n" in text
    assert "  --scheduler.init_args.num_steps  int, required\n" in text
    assert "params" not in text
    assert ".help" not in text


def test_the_help_leaves_out_a_scheduler_that_is_unset():
    assert "scheduler" not in describe_classes(run_config(config("Task")))


def build_classes_of_torch(world):
    """Build them in a process that has imported torch and done nothing else; tell whether it touched CUDA."""
    warnings.simplefilter("error")
    adamw = {"lr": 0.1, "betas": [0.5, 0.9], "fused": None}
    optimizer = OptimizerConfig(class_path="torch.optim.AdamW", init_args=adamw)
    optimizer = build("optimizer", optimizer, [torch.nn.Parameter(torch.zeros(2))])
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (0.1, (0.5, 0.9))
    cosine = ClassConfig(class_path="torch.optim.lr_scheduler.CosineAnnealingLR", init_args={"T_max": 5})
    assert build("scheduler", cosine, optimizer).T_max == 5
    return torch.cuda.is_initialized()


def test_classes_of_torch_are_checked_and_built_without_touching_cuda():
    assert run_distributed(build_classes_of_torch, 1) == [False]
