"""The section scheduler: a name, a class or a warm-up, and steps as a number or as a part of the run."""

import pytest

from lanewise.config import SchedulerConfig, TrainConfig
from lanewise.config.check import read_section
from lanewise.errors import ConfigError


def mistake_in(section: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_section(SchedulerConfig, section, "scheduler")
    (mistake,) = caught.value.mistakes
    return mistake


WARMUP = "scheduler.warmup must be a whole number at least 0 or a number at least 0 and less than 1: got "


@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 0), (0.0, 0), (3, 3), (1, 1), (0.05, 10), (0.07, 14), (0.001, 0), (500, 500)]
)
def test_steps_are_a_number_or_a_part_of_the_run(warmup, steps):
    section = read_section(SchedulerConfig, {"name": "wsd", "warmup": warmup, "decay": warmup})
    assert (section.warmup_steps(200), section.decay_steps(200)) == (steps, steps)


def test_the_decay_of_wsd_is_a_fifth_of_the_run():
    assert SchedulerConfig(name="wsd").decay_steps(200) == 40


def test_a_name_may_stand_alone():
    assert read_section(SchedulerConfig, "cosine", "scheduler") == SchedulerConfig(name="cosine")
    assert mistake_in("cosin").endswith('got "cosin". Did you mean cosine?')


def test_a_class_is_a_class_config():
    section = SchedulerConfig(class_path="a.B", init_args={"x": 1}, warmup=2)
    assert section.of_class is not None
    assert (section.of_class.class_path, section.of_class.init_args) == ("a.B", {"x": 1})
    assert SchedulerConfig(name="linear").of_class is None


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "cosin"}, 'scheduler.name must be one of linear, cosine, wsd: got "cosin". Did you mean'),
        ({}, "scheduler.name, scheduler.class_path or scheduler.warmup must be given: got none of them."),
        ({"warmup": 0}, "scheduler.name, scheduler.class_path or scheduler.warmup must be given"),
        (
            {"class_path": "a.B", "min_lr_factor": 0.1},
            "scheduler.min_lr_factor needs a name, and num_cycles the name cosine: got 0.1, 1 and name null.",
        ),
        (
            {"name": "wsd", "num_cycles": 2},
            'scheduler.min_lr_factor needs a name, and num_cycles the name cosine: got 0.0, 2 and name "wsd"',
        ),
        (
            {"name": "cosine", "min_lr": 1e-5},
            "scheduler.min_lr is not a key of scheduler. Did you mean scheduler.min_lr_factor?",
        ),
        (
            {"name": "linear", "class_path": "a.B"},
            "scheduler.name and scheduler.class_path exclude each other: got linear and a.B. Leave one",
        ),
        (
            {"name": "linear", "init_args": {"x": 1}},
            'scheduler.init_args are those of scheduler.class_path: got {"x": 1} and no class_path.',
        ),
        (
            {"name": "cosine", "decay": 0.2},
            'scheduler.decay is of scheduler.name wsd: got decay 0.2 and name "cosine". Leave it out',
        ),
        ({"class_path": "a.B", "decay": 2}, "scheduler.decay is of scheduler.name wsd: got decay 2"),
        (
            {"name": "cosine", "interval": "epoch"},
            "scheduler.interval epoch needs a class, no warmup: got None and 0. Use step.",
        ),
        (
            {"class_path": "a.B", "interval": "epoch", "warmup": 3},
            "scheduler.interval epoch needs a class, no warmup: got a.B and 3.",
        ),
        ({"name": "linear", "warmup": -1}, "scheduler.warmup must be at least 0: got -1."),
        ({"name": "linear", "warmup": 1.0}, f"{WARMUP}1.0."),
        ({"name": "linear", "warmup": float("nan")}, f"{WARMUP}NaN."),
        (
            {"name": "linear", "warmup": "5%"},
            "scheduler.warmup must be a whole number at least 0 or a number at least 0 and less than 1: got",
        ),
        ({"name": "linear", "warmup": True}, "scheduler.warmup must be a whole number at least 0 or"),
    ],
)
def test_what_is_wrong_is_said(section, said):
    assert mistake_in(section).startswith(said)


def test_the_key_that_it_was_is_known():
    with pytest.raises(ConfigError) as caught:
        read_section(TrainConfig, {"run_dir": "r", "epochs": 1, "warmup_steps": 5}, "train")
    assert list(caught.value.mistakes) == [
        "train.warmup_steps is not a key of train. Use scheduler.warmup, which took its place."
    ]
