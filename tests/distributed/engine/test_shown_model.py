"""A callback with the model: on rank 0, between steps, without a trace in the run."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise import Callback
from lanewise.config import EvaluateConfig, ReducerName, RunConfig
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.errors import ConfigError, TaskError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.watch.heartbeat import heartbeat
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.runs.loggers.jsonl import JsonlLogger
from lanewise.testing import run_distributed
from tests.distributed.reduce.test_fsdp import Deeper
from tests.distributed.tasks import Sentences, configure, state_bytes

STEPS = 5


class Evaluated(Deeper):
    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": Sentences(7)}


class Writes(Callback):
    """Generates text in forwards of many lengths, draws from every generator, and tries a gradient."""

    def __init__(self, every: int | None = None, *, is_careless: bool = False) -> None:
        self.model_every_steps, self.is_careless = every, is_careless

    def on_model(self, epoch: int, step: int, model: nn.Module) -> None:
        assert not model.training
        assert not torch.is_grad_enabled()
        before = heartbeat.num_pieces
        tokens = torch.randint(1, 30, (1, 1))
        for _ in range(4):
            tokens = torch.cat([tokens, model(tokens)[:, -1].float().softmax(-1).multinomial(1)], dim=1)
        assert heartbeat.num_pieces > before, "the watch would see no progress"
        drawn = [random.randrange(100), int(np.random.randint(100))]  # noqa: NPY002
        self.log_text("text", f"{epoch} {step} {tokens.tolist()} {drawn}")
        self.log_image("noise", torch.rand(3, 2, 2))
        model.train()
        if self.is_careless:
            for buffer in model.buffers():
                buffer.zero_()


def fit(
    world: World, config: RunConfig, folder: str, callbacks: list[Callback]
) -> tuple[dict[str, bytes], list[str]]:
    """Go on from what is there; return the weights, and on rank 0 the texts of the run."""
    set_determinism("exact", threads=1)
    run = build_run(config, world)
    run_dir = RunDir(Path(folder))
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, ())
    loggers = [JsonlLogger(run_dir.metrics, first_step)] if world.rank == 0 else []
    engine = Engine(run, first_step=first_step, saving=Saving(run, checkpoints))
    engine.fit(run_dir, [*loggers, *callbacks])
    world.all_gather_tree(None)
    lines = (
        [json.loads(line) for line in run_dir.media.read_text().splitlines()]
        if run_dir.media.exists()
        else []
    )
    return state_bytes(run.training.evaluated_model), [line["text"] for line in lines if "text" in line]


def configured(reducer: ReducerName = "ddp", steps: int = STEPS, **sections: Any) -> RunConfig:
    config = configure(Evaluated, num_lanes=4, steps=steps, num_samples=16)
    config = replace(config, evaluate=EvaluateConfig(every_steps=2), **sections)
    return replace(config, distributed=replace(config.distributed, reducer=reducer))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict[str, bytes], list[str]]:
    folder = str(tmp_path_factory.mktemp("alone"))
    return run_distributed(fit, 1, configured(), folder, [Writes()])[0]


def steps_of(texts: list[str]) -> list[tuple[int, int]]:
    return [(int(text.split()[0]), int(text.split()[1])) for text in texts]


def test_it_is_called_before_the_first_step_after_evaluations_and_after_the_last_step(alone):
    assert steps_of(alone[1]) == [(0, 0), (1, 2), (2, 4), (3, 5)]


def test_a_run_without_it_has_the_same_bytes(alone, tmp_path):
    weights, texts = run_distributed(fit, 1, configured(), str(tmp_path), [])[0]
    assert weights == alone[0]
    assert texts == []


@pytest.mark.parametrize("reducer", ["ddp", "fsdp"])
def test_two_processes_have_the_same_bytes_and_texts(alone, tmp_path, reducer):
    """Under fsdp rank 0 runs forwards alone, on whole weights."""
    first, second = run_distributed(fit, 2, configured(reducer), str(tmp_path), [Writes(is_careless=True)])
    assert first == alone
    assert second[0] == alone[0]


@pytest.mark.parametrize("reducer", ["ddp", "fsdp"])
def test_bf16_and_an_average_leave_no_trace_either(tmp_path, reducer):
    train = replace(configured().train, ema_decay=0.5)
    config = configured(reducer, precision="bf16", train=train)
    found = {}
    for name, callbacks in (("with", [Writes(every=2)]), ("without", [])):
        found[name] = [
            weights for weights, _ in run_distributed(fit, 2, config, str(tmp_path / name), callbacks)
        ]
    assert found["with"] == found["without"]


def test_a_run_that_goes_on_elsewhere_has_each_text_once(alone, tmp_path):
    run_distributed(fit, 2, configured(steps=4), str(tmp_path), [Writes()])
    for result in run_distributed(fit, 1, configured(), str(tmp_path), [Writes()]):
        assert result == alone


def test_every_so_many_steps_and_several_callbacks(tmp_path):
    callbacks = [Writes(every=1), Writes(every=3)]
    _, texts = run_distributed(fit, 1, configured(steps=3), str(tmp_path), callbacks)[0]
    assert steps_of(texts) == [(0, 0), (0, 0), (1, 1), (1, 2), (2, 3), (2, 3)]
    assert len(set(texts)) == 4, "both are called under one random state"


class Misuses(Callback):
    def __init__(self, how: str) -> None:
        self.how = how
        if how == "never":
            self.model_every_steps = 0

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self.log_text("late", "text")

    def on_model(self, epoch: int, step: int, model: nn.Module) -> None:
        if self.how == "in place":
            model.head.weight.add_(1)
        elif self.how == "half":
            model.half()
        elif self.how == "data":
            model.head.weight.data.mul_(2)
        elif self.how == "replace":
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        elif self.how == "hook":
            model.head.register_forward_hook(lambda _module, _given, outputs: outputs + 1)


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        (
            "in place",
            TaskError,
            r"changed parameter embedding\.weight, .*\nin on_model of a callback after step 0",
        ),
        (
            "half",
            TaskError,
            r"changed parameter embedding\.weight, .*\nin on_model of a callback after step 0",
        ),
        ("data", TaskError, r"^on_model of Misuses changed parameter embedding\.weight"),
        ("replace", TaskError, r"^on_model of Misuses changed parameter head\.weight"),
        ("hook", TaskError, r"^on_model of Misuses changed the hooks of head"),
        ("never", ConfigError, r"model_every_steps of a callback must be at least 1, or None: got \[0\]"),
        ("later", TaskError, r"Misuses logs late outside of on_model\. Log it there\."),
    ],
)
def test_a_misuse_is_an_error(tmp_path, how, error, said):
    with pytest.raises(error, match=said):
        fit(LocalWorld(torch.device("cpu")), configured(), str(tmp_path), [Misuses(how)])
