"""Tests for lanewise.adapt.sections."""

import pytest

from lanewise.adapt.sections import merged, steps_of

READ = {
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    "train": {"epochs": 3, "seed": 1},
    "data": {"drop_last": False},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}},
    "precision": "bf16",
}


def test_given_keys_take_the_place_of_those_that_were_read():
    found = merged(
        READ, {"batch": {"global_batch_size": 16}, "train": {"run_dir": "x"}, "log": {"every_steps": 1}}
    )
    assert found["batch"] == {"global_batch_size": 16, "micro_batch_size": 2}
    assert found["train"] == {"epochs": 3, "seed": 1, "run_dir": "x"}
    assert found["log"] == {"every_steps": 1}
    assert READ["train"] == {"epochs": 3, "seed": 1}


def test_a_length_a_class_and_a_text_replace_the_whole():
    given = {
        "train": {"max_steps": 5},
        "optimizer": {"class_path": "torch.optim.Adam"},
        "precision": "float32",
    }
    found = merged(READ, given)
    assert found["train"] == {"max_steps": 5, "seed": 1}
    assert found["optimizer"] == {"class_path": "torch.optim.Adam"}
    assert found["precision"] == "float32"


@pytest.mark.parametrize(
    ("num_samples", "train", "drop_last", "expected"),
    [
        (20, {"epochs": 3}, False, (3, 9)),
        (20, {"epochs": 3}, True, (2, 6)),
        (20, {"epochs": 3, "max_steps": 5}, False, (3, 5)),
        (20, {"epochs": 2.5}, False, (3, 7.5)),
        (5, {"max_steps": 7}, True, (1, 7)),
    ],
)
def test_the_length_of_a_run_is_counted_in_steps(num_samples, train, drop_last, expected):
    sections = {"batch": READ["batch"], "train": train, "data": {"drop_last": drop_last}}
    assert steps_of(sections, num_samples) == expected
