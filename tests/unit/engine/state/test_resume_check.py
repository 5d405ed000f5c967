"""How the difference between a run and a checkpoint is said."""

from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest
import torch

from lanewise.config import (
    ActivationCheckpointingConfig,
    CompileConfig,
    MemoryConfig,
    RunConfig,
    SchedulerConfig,
)
from lanewise.config.check import Section
from lanewise.engine.state.resume_check import compare, identify
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import Language, configure

OWN = {"lanes": {"micro_batch_size": 2}, "seed": 0, "exact": None, "precision": "fp16"}


def test_equal_runs_have_no_difference():
    assert compare(OWN, dict(OWN), ()) == ([], [])


def test_every_difference_is_told_with_both_values():
    saved = {"lanes": {"micro_batch_size": 4}, "seed": 1, "exact": {"threads": 1}, "precision": "bf16"}
    mistakes, allowed = compare(OWN, saved, ())
    assert mistakes == [
        "exact was {'threads': 1}, and is None now",
        "lanes was {'micro_batch_size': 4}, and is {'micro_batch_size': 2} now",
        "precision was bf16, and is fp16 now",
        "seed was 1, and is 0 now",
    ]
    assert allowed == []


def test_what_is_allowed_is_told_apart():
    mistakes, allowed = compare(OWN, {**OWN, "seed": 1, "precision": "bf16"}, ["seed", "lanes"])
    assert mistakes == ["precision was bf16, and is fp16 now"]
    assert allowed == ["seed was 1, and is 0 now"]


@pytest.mark.parametrize(("own", "saved"), [(OWN, {}), ({}, OWN)])
def test_what_only_one_of_them_knows_is_a_difference(own, saved):
    mistakes, _ = compare(own, saved, ())
    assert len(mistakes) == 3  # None is as good as nothing


def test_a_checkpoint_of_before_onednn_was_noted_is_of_this_run():
    own = OWN | {"exact": {"threads": 1, "onednn": "avx512_bf16"}}
    assert compare(own, OWN | {"exact": {"threads": 1}}, ()) == ([], [])
    mistakes, _ = compare(own, OWN | {"exact": {"threads": 1, "onednn": "none"}}, ())
    assert mistakes == [
        "exact was {'threads': 1, 'onednn': 'none'}, and is {'threads': 1, 'onednn': 'avx512_bf16'} now"
    ]


@pytest.mark.parametrize("equality", ["close", "exact"])
def test_compiled_and_eager_are_one_run_in_close_only(equality):
    def identity(**sections):
        config = replace(configure(Language, equality=equality), **sections)
        return identify(config, {}, LocalWorld(torch.device("cpu")), 9)

    mistakes, _ = compare(identity(), identity(compile=CompileConfig()), ())
    expected = "compile was {'blocks': 'auto', 'dynamic': None}, and is None now"
    assert mistakes == ([expected] if equality == "exact" else [])
    memory = MemoryConfig(activation_checkpointing=ActivationCheckpointingConfig())
    assert compare(identity(), identity(memory=memory), ()) == ([], [])


def test_a_checkpoint_of_before_a_scheduler_had_a_floor_is_of_this_run():
    def identity(**keys):
        config = replace(configure(Language), scheduler=SchedulerConfig(name="cosine", **keys))
        return identify(config, {}, LocalWorld(torch.device("cpu")), 9)

    assert identity()["scheduler"] == {"name": "cosine", "warmup": 0, "decay": None}
    mistakes, _ = compare(identity(min_lr_factor=0.1), identity(), ())
    assert len(mistakes) == 1
    assert "'min_lr_factor': 0.1" in mistakes[0]


WITHOUT_INFLUENCE = {
    "callbacks.class_path": "callbacks get the model under a state of their own, after the step",
    "callbacks.init_args": "as their class",
    "checkpoint": "when files are written",
    "data.missing": "a run in which a sample was missing ended, or left it out",
    "data.num_workers": "who reads",
    "data.pin_memory": "where batches lie",
    "distributed": "what a run may be moved to; of exact `threads` is in the identity",
    "evaluate.every_epochs": "when it is evaluated",
    "evaluate.every_steps": "as above",
    "integrity": "what is written besides",
    "log": "what is shown",
    "memory": "the same operators, computed again",
    "optimizer.init_args": "a checkpoint's state replaces them; --allow optimizer sets them",
    "scheduler.init_args": "as of the optimizer",
    "search_path": "where classes are found",
    "train.epochs": "how long it is trained; of a scheduler that knows it, `num_steps`",
    "train.max_steps": "as above",
    "train.profile_steps": "what is written besides",
    "train.run_dir": "where files are written",
}
"""Keys and sections that may differ on resume without a word, and why."""

IN_THE_IDENTITY = {
    "batch.global_batch_size",
    "batch.micro_batch_size",
    "compile.blocks",
    "compile.dynamic",
    "data.drop_last",
    "data.order.class_path",
    "data.order.init_args",
    "data.shuffle_buffer",
    "evaluate.best",
    "evaluate.best_mode",
    "evaluate.early_stopping.metric",
    "evaluate.early_stopping.min_delta",
    "evaluate.early_stopping.mode",
    "evaluate.early_stopping.patience",
    "optimizer.class_path",
    "optimizer.closure",
    "optimizer.parameter_groups.options",
    "optimizer.parameter_groups.patterns",
    "precision",
    "scheduler.class_path",
    "scheduler.decay",
    "scheduler.interval",
    "scheduler.min_lr_factor",
    "scheduler.name",
    "scheduler.num_cycles",
    "scheduler.warmup",
    "task",
    "train.ema_decay",
    "train.init_from.leave_out",
    "train.init_from.path",
    "train.init_from.prefixes",
    "train.max_grad_norm",
    "train.seed",
}


def _keys(section, before=""):
    types = get_type_hints(section)
    for field in fields(section):
        parts = (types[field.name], *get_args(types[field.name]))
        inner = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
        if not inner or field.name == "task":
            yield before + field.name
        for part in inner if field.name != "task" else ():
            yield from _keys(part, f"{before}{field.name}.")


def test_a_new_key_is_in_the_identity_or_without_influence():
    """Else a run would go on silently with another value of it."""
    undecided = {
        key
        for key in _keys(RunConfig)
        if key not in IN_THE_IDENTITY and not {key, key.split(".")[0]} & WITHOUT_INFLUENCE.keys()
    }
    assert not undecided, "put each into `identify`, or say here why it may differ"
    assert set(_keys(RunConfig)) >= IN_THE_IDENTITY
