"""What `lanewise.train` makes of its arguments."""

from collections import UserDict, UserList
from dataclasses import fields
from typing import Any

import pytest

from lanewise import Callback, train
from lanewise.commands.jobs import api
from lanewise.config import RunConfig
from lanewise.config.strict_yaml import read_yaml, write_yaml
from lanewise.errors import ConfigError
from tests.distributed.tasks import Smooth

SECTIONS: dict[str, Any] = {
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    "train": {"max_steps": 5, "run_dir": "unused"},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
    "scheduler": {"name": "cosine"},
    "precision": "bf16",
    "memory": {"activation_checkpointing": "auto"},
    "compile": "auto",
    "data": {"num_workers": 1},
    "log": {"every_steps": 3},
    "evaluate": {"every_epochs": 3},
    "checkpoint": {"keep_last": 3},
    "integrity": {"digest_every_steps": 3},
    "distributed": {"devices": 2},
}


def test_it_takes_every_section_of_a_configuration(monkeypatch):
    """Without `memory` and `compile` they were a TypeError."""
    jobs = []
    result = {"run_dir": "runs", "step": 1, "evaluation": {}, "best_step": None, "best_value": None}
    monkeypatch.setattr(api, "start", lambda job, **_: jobs.append(job) or result)
    names = {field.name for field in fields(RunConfig)} - {"search_path"}  # where the task's module lies
    assert set(api.Sections.__annotations__) == names - {"task", "callbacks"}
    assert set(SECTIONS) == names - {"task", "callbacks"}  # which are objects
    train(Smooth(), **SECTIONS)
    least = {name: SECTIONS[name] for name in ("batch", "train", "optimizer")}
    train(Smooth(), **least, distributed={"devices": 1})
    given, without = (job.config for job in jobs)
    for name in names - set(least) - {"task", "callbacks"}:
        assert getattr(given, name) != getattr(without, name), name
    assert given.memory.activation_checkpointing.blocks == given.compile.blocks == "auto"


class EarlyStopping:
    """Of another library."""


def test_a_callback_of_another_library_is_refused_before_anything_starts(monkeypatch):
    """It failed in the started process, with 71 lines about a method that it lacks."""
    monkeypatch.setattr(api, "start", None)
    with pytest.raises(
        ConfigError, match=r"got EarlyStopping\. evaluate\.early_stopping, evaluate\.best and"
    ):
        train(Smooth(), **SECTIONS, callbacks=[Callback(), EarlyStopping()])


def test_what_may_differ_on_resume_is_said_from_python_as_on_the_command_line(monkeypatch):
    """A resume named `--allow` as its remedy, which lanewise.train did not have."""
    jobs = []
    result = {"run_dir": "runs", "step": 1, "evaluation": {}, "best_step": None, "best_value": None}
    monkeypatch.setattr(api, "start", lambda job, **_: jobs.append(job) or result)
    train(Smooth(), **SECTIONS, resume=True, allow=["optimizer"])
    assert (jobs[0].is_resumed, jobs[0].allow, jobs[0].overwrites) == (True, ("optimizer",), False)
    train(Smooth(), **SECTIONS, resume=True, allow="optimizer")  # a text was taken letter by letter
    assert jobs[1].allow == ("optimizer",)
    with pytest.raises(ConfigError, match=r"add resume=True, or leave it out"):
        train(Smooth(), **SECTIONS, allow=["optimizer"])
    with pytest.raises(ConfigError, match=r"out of lanes, .*: got lr\."):
        train(Smooth(), **SECTIONS, resume=True, allow=["lr", "seed"])


class Composed(Smooth):
    """Gets a part of a configuration that another library composed."""

    def __init__(self, model: Any) -> None:
        super().__init__()


def test_the_containers_of_another_library_are_those_of_a_file():
    """config.yaml could not be written, with 'a configuration holds text, ...: got a DictConfig'."""
    options = UserDict({"lr": 0.5, "betas": UserList([0.9, 0.99])})
    sections = UserDict(
        {**SECTIONS, "optimizer": UserDict(class_path="torch.optim.AdamW", init_args=options)}
    )
    config = api.config_of(Composed(UserDict(sizes=UserList([3]))), **sections)
    assert config.optimizer.init_args == {"lr": 0.5, "betas": [0.9, 0.99]}
    assert config.task.init_args == {"model": {"sizes": [3]}}
    for section in (config.task, config.optimizer):
        assert read_yaml(write_yaml(section.init_args), "written") == section.init_args
