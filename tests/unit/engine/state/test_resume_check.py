"""How the difference between a run and a checkpoint is said."""

from dataclasses import replace

import pytest
import torch

from lanewise.config import ActivationCheckpointingConfig, CompileConfig, MemoryConfig, SchedulerConfig
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
