"""What the configuration of somebody else's run may name, and which folders only the user writes."""

import dataclasses
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lanewise import Task
from lanewise.config import ClassConfig
from lanewise.config.classes import check_classes
from lanewise.config.load import Override, dump_config, load_config
from lanewise.config.trust import distrust, refusing_imports_from
from lanewise.errors import ConfigError
from tests.unit.config.test_run import run_config

POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "ran"]}}
LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}


class Base:
    """What a signature may ask for."""


class Holder(Base):
    """Holds anything."""

    def __init__(self, held: Any = None) -> None: ...


class Given(Task):
    """Has arguments of all kinds."""

    def __init__(
        self,
        *,
        untyped=None,
        anything: Any = None,
        thing: object = None,
        hashable: Hashable | None = None,
        several: list[Any] | None = None,
        either: Base | Any = None,
        function: Callable[..., Any] | None = None,
        functions: Iterable[Callable[..., Any]] = (),
        holder: Base | None = None,
        module: nn.Module | None = None,
        name: str = "",
        **others: Any,
    ) -> None: ...


Given.__abstractmethods__ = frozenset()
Given.loss = None  # nobody computes it


def check(**init_args: object) -> None:
    task = ClassConfig(class_path=f"{__name__}.Given", init_args=init_args)
    config = run_config(task=task)
    check_classes(config, untrusted=("/somewhere",))


def in_holder(value: object) -> dict[str, object]:
    return {"class_path": f"{__name__}.Holder", "init_args": {"held": value}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, POPEN) for name in ("untyped", "anything", "thing", "hashable", "either", "unknown")),
        ("several", [1, POPEN]),
        ("holder", in_holder(POPEN)),
        ("holder", in_holder(in_holder(POPEN))),
        ("holder", in_holder([LINEAR, {"a": POPEN}])),
        ("function", "json.dumps"),
        ("functions", ["torch.nn.functional.relu", "json.dumps"]),
        ("function", {"class_path": "functools.partial"}),
        # A class of torch that starts a program, and one that torch imports.
        (
            "untyped",
            {"class_path": "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"},
        ),
        ("untyped", {"class_path": "torch.nn.modules.module.OrderedDict"}),
        ("untyped", {"class_path": "lanewise.data.audit.AuditLog"}),  # writes into a folder
    ],
)
def test_what_no_type_asks_for_is_refused(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check(**{name: value})
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"task.init_args.{name}")
    assert "cannot be used" in mistake
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("untyped", LINEAR),
        ("several", [LINEAR]),
        ("holder", in_holder(LINEAR)),
        ("module", {"class_path": f"{__name__}.Net"}),
        ("function", "torch.nn.functional.relu"),
        ("name", str(POPEN)),
        ("untyped", {"a": [1, "subprocess.Popen"]}),
    ],
)
def test_what_a_type_asks_for_or_everybody_knows_is_built(name, value):
    check(**{name: value})


def test_no_program_is_run_to_look_for_what_a_type_asks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "a_program").mkdir()
    (tmp_path / "a_program" / "__main__.py").write_text(
        "import pathlib; pathlib.Path(__file__ + '.ran').touch()"
    )
    for name, value in [
        ("holder", {"class_path": "a_program.__main__.X"}),
        ("function", "a_program.__main__.f"),
    ]:
        with pytest.raises(ConfigError):
            check(**{name: value})
    assert not [*tmp_path.rglob("*.ran")]


class Net(nn.Module):
    """A model that a signature asks for."""


def test_an_object_of_the_project_needs_no_type(tmp_path, monkeypatch):
    (tmp_path / "own_things.py").write_text("class Thing: pass")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    task = ClassConfig(
        class_path=f"{__name__}.Given", init_args={"untyped": {"class_path": "own_things.Thing"}}
    )
    config = dataclasses.replace(run_config(task=task), search_path=str(tmp_path))
    check_classes(config, untrusted=("/somewhere",))
    with pytest.raises(ConfigError, match=r"untyped.class_path: own_things.Thing cannot be used. .*--trust"):
        check_classes(dataclasses.replace(config, search_path=None), untrusted=("/somewhere",))


def is_kept(folder: Path, *overrides: Override) -> bool:
    """Tell whether the search_path of a run may be used."""
    file = folder / "run" / "config.yaml"
    file.parent.mkdir(exist_ok=True)
    project = folder / "project"
    project.mkdir(exist_ok=True)
    file.write_text(
        dump_config(
            dataclasses.replace(run_config(task=ClassConfig(class_path="a.B")), search_path=str(project))
        )
    )
    config, untrusted = distrust(file.parent, load_config(str(file), overrides), overrides)
    assert untrusted[0] == str(file.parent)
    assert (config.search_path is None) == (str(project) in untrusted)
    return config.search_path is not None


@pytest.fixture
def in_project(tmp_path, monkeypatch):
    """A folder of which the project is the working directory."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "group", "kept"),
    [(0o755, "own", True), (0o775, "own", True), (0o775, "staff", False), (0o777, "own", False)],
)
def test_a_folder_that_others_can_write_is_not_searched(in_project, monkeypatch, mode, group, kept):
    monkeypatch.setattr(Path, "owner", lambda _: "own")
    monkeypatch.setattr(Path, "group", lambda _: group)
    assert is_kept(in_project)
    (in_project / "project").chmod(mode)
    assert is_kept(in_project) == kept
    assert is_kept(in_project, Override("search_path", str(in_project / "project")))


def test_a_folder_of_another_user_is_not_searched(in_project, monkeypatch):
    assert is_kept(in_project)
    uid = os.getuid()
    monkeypatch.setattr(
        "lanewise.config.trust.os", SimpleNamespace(**{**vars(os), "getuid": lambda: uid + 1})
    )
    assert not is_kept(in_project)


def test_a_folder_beside_a_run_that_only_the_run_names_is_not_searched(tmp_path, monkeypatch):
    """It is the user's, as all that was unpacked here, and ran code of whoever packed it."""
    assert not is_kept(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "project"), *sys.path])
    assert is_kept(tmp_path)


def test_a_working_directory_that_lies_in_a_run_is_not_searched_nor_what_python_finds_there(in_project):
    (in_project / "run.jsonl").touch()
    assert not is_kept(in_project)
    config = dataclasses.replace(run_config(task=ClassConfig(class_path="a.B")), search_path="/nowhere")
    assert str(in_project) in distrust(in_project / "run", config, ())[1]
    named = dataclasses.replace(config, search_path=str(in_project / "project"))
    assert distrust(in_project / "run", named, [Override("search_path", "project")])[1] == (
        str(in_project / "run"),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that modules are imported from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_an_environment_inside_of_a_refused_folder_is_not_refused(folder):
    (folder / "a_task_of_mine.py").touch()
    project = os.path.commonpath([folder, sysconfig.get_path("purelib")])
    with refusing_imports_from([project]):
        for name in ("tensorboard", "wave"):  # which no test here imports
            assert importlib.util.find_spec(name) is not None
        with pytest.raises(ConfigError, match=r"^a_task_of_mine would be imported from .*a_task_of_mine\.py"):
            importlib.util.find_spec("a_task_of_mine")
