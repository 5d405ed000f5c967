"""Trainers of transformers, read by lanewise.hugging_face: against the library, and on 1 to 3 processes."""

import warnings
from importlib import import_module
from importlib.util import find_spec

import cloudpickle
import pytest

from lanewise.commands.jobs.api import config_of
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.testing import run_distributed
from tests.distributed.tasks import state_bytes

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="not installed: transformers"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="not installed: accelerate"),
]
FAST = ("gpt2", "bert tokens", "segmentation")


TRAINERS = "tests.distributed.trainers"
"""Which the processes import; this one does without transformers, which takes seconds."""


def call(name, *args):
    """Call a function of that module in a new process."""
    return run_distributed(called, 1, name, args)[0]


def called(world, name, args):
    return getattr(import_module(TRAINERS), name)(world, *args)


def read_runs(world, cases, given):
    """Return the runs as they are sent to workers."""
    from tests.distributed.trainers import run_of

    return [cloudpickle.dumps(run_of(case, **given)) for case in cases]


def train_run(world, pickled, **sections):
    """Train what was read, with sections in its place; return the losses and the bytes of the model."""
    run = cloudpickle.loads(pickled) | sections
    warnings.filterwarnings(
        "ignore", "Grad strides do not match", UserWarning
    )  # torch's DDP, of a convolution
    config = config_of(**run)
    set_determinism("exact", threads=1)
    engine = build_engine(config, world, run["task"])
    losses = [report.totals.loss for report in engine.steps()]
    return losses, state_bytes(engine.training.model)


def train_runs(world, pickled):
    return [train_run(world, run) for run in pickled]


def compare_with_the_library(world, cases, given):
    from tests.distributed.trainers import losses_of_the_library, run_of

    return [
        (losses_of_the_library(case, **given), train_run(world, cloudpickle.dumps(run_of(case, **given)))[0])
        for case in cases
    ]


PEFT = () if find_spec("peft") is None else ("gpt2 peft",)
BERT = ("bert sequences", "bert regression", "bert masked", "bert own loss")
OTHERS = ("gpt2 smoothed", *BERT, "question answering", "multiple choice", "t5", "vit", "llama")
CASES = [FAST, pytest.param((*OTHERS, *PEFT), marks=pytest.mark.slow)]


@pytest.mark.parametrize("cases", CASES)
def test_the_loss_is_that_of_the_library_for_fifty_steps(cases):
    compared = run_distributed(compare_with_the_library, 1, cases, {"max_steps": 50})[0]
    for case, (theirs, ours) in zip(cases, compared, strict=True):
        assert len(theirs) == 50, case
        assert ours == pytest.approx(theirs, rel=2e-5), case
        assert theirs[-1] < theirs[0], case


@pytest.mark.parametrize(
    "cases", [FAST, pytest.param((*OTHERS, "llama bfloat16", *PEFT), marks=pytest.mark.slow)]
)
def test_one_to_three_processes_give_the_same_bytes(cases):
    given = {"gradient_accumulation_steps": 3, "num_train_epochs": 2}
    runs = run_distributed(read_runs, 1, cases, given)[0]
    (alone,) = run_distributed(train_runs, 1, runs)
    assert [len(losses) for losses, _ in alone] == [4] * len(cases)
    for world_size in (2, 3):
        for result in run_distributed(train_runs, world_size, runs):
            assert result == alone


def test_all_that_a_run_does_not_do_is_refused_at_once():
    said = call("ask_for_much")
    assert "OwnLoss overrides compute_loss, which nothing here calls. Write a Task." in said
    assert "the callback Stopping is not called" in said
    assert "TrainingArguments.neftune_noise_alpha is 5.0" in said
    assert "train_sampling_strategy is 'group_by_length'" in said
    assert "give a Task with sample_lengths" in said
    assert "TrainingArguments.data_seed is 3" in said
    assert "activation_checkpointing is True, which a run does not do. Leave it out, and give memory=" in said
    assert "is a ChainDataset, which has no length" in said
    assert "deepspeed is {'zero_optimization': {'stage': 2}}, which a run does not do. Leave it out" in said
    assert 'give distributed={"reducer": "fsdp"} or {"shard_optimizer": True}' in said
    assert len(said.splitlines()) == 8 + 1


def test_what_a_run_does_not_do_is_refused_and_its_neighbours_are_read():
    said = call("what_is_said")
    for name in ("among themselves", "clip"):
        assert "of 4 samples is not what they add up to one by one" in said[name]
    assert "weights of their own, as its cross_entropy has a weight. Write a Task" in said["weighted"]
    assert "it must be a sum that is divided by it, or a mean that ignores it" in said["penalty"]
    assert "the ReduceLROnPlateau is stepped with a metric" in said["plateau"]
    assert said["plateau in its place"] == ""  # as the error asks for, which was raised once more
    assert "Seq2SeqTrainingArguments.predict_with_generate is True" in said["generation"]
    assert "give a Task with eval_forward" in said["generation"]
    assert said["no generation"] == ""
    assert said["no labels to smooth"] == ""
    assert said["bfloat16"] == ""


def test_of_a_gpt2_the_targets_are_counted_and_not_all_labels():
    """The library divides the loss of a GPT-2 by all labels, though the first of each row is no target."""
    counts, ratio, share_of_targets = call("what_gpt2_counts")
    assert counts == "labels[..., 1:]"
    assert share_of_targets < 0.95
    assert ratio == pytest.approx(share_of_targets, rel=1e-5)


def test_a_run_leaves_what_the_library_loads_and_evaluates_as_it_does():
    results = [call("train_and_use", devices) for devices in (1, 2)]
    assert results[0]["model"] == results[1]["model"]
    for result in results:
        step, best = result["best"]
        assert result["steps"] == 6
        assert step in (3, 6)
        theirs = result["theirs"]
        assert best == pytest.approx(theirs["eval_accuracy"])
        for name in ("order", "width"):
            assert result["ours"][f"eval/metrics/{name}"] == theirs[f"eval_{name}"]


def test_less_of_an_error_is_better_though_the_library_says_it_of_a_loss_alone():
    """It sets greater_is_better to True for wer where it is unset, and so the worst model was kept."""
    of_names = {"wer None": "min", "f1 None": "max", "own None": "max"}
    assert call("modes") == {**of_names, "own False": "min", "own_loss True": "max"}


def test_torchrun_is_refused():
    assert "starts its own processes: run it without torchrun" in call("under_torchrun")


def test_arguments_become_sections_and_what_is_given_comes_before():
    best = {"metric": "hard_old/metrics/accuracy", "mode": "max"}
    assert call("sections", {}) == {
        "batch": {"global_batch_size": 16, "micro_batch_size": 4},
        "train": {"run_dir": "unused", "seed": 42, "epochs": None, "max_steps": 5},
        "data": {"num_workers": 0, "drop_last": False, "order": "sequential"},
        "precision": "bf16",
        "distributed": {"device_type": "cpu"},
        "log": {"every_steps": 2, "gradients": True},
        "evaluate": {
            "every_steps": 4,
            "best": best["metric"],
            "best_mode": "max",
            "early_stopping": {**best, "patience": 2, "min_delta": 0.5},
        },
        "checkpoint": {"every": {"epochs": 1}, "keep_last": 3},
    }
    given = {"train": {"epochs": 7, "run_dir": "there"}, "precision": "float32"}
    found = call("sections", given)
    assert found["train"] == {"run_dir": "there", "seed": 42, "epochs": 7}
    assert found["precision"] == "float32"
