"""Which datasets a loop may go on with, and by which numbers their samples draw."""

from pathlib import Path

import pytest

from lanewise.engine.own_loop.datasets import OwnDatasets
from lanewise.errors import CheckpointError

PATH = Path("runs/step-000003")
ORDER = {"order": {"class_path": "lanewise.lanes.ShuffledOrder"}, "drop_last": False}


def identity(samples: str, num_samples: int = 8) -> dict:
    return {"num_samples": num_samples, "samples_digest": samples, "tables_digest": "", **ORDER}


def restored(*identities: dict) -> OwnDatasets:
    datasets = OwnDatasets()
    datasets.restore(identities, PATH)
    return datasets


def test_datasets_and_calls_have_numbers_which_a_checkpoint_keeps():
    datasets = OwnDatasets()
    assert datasets.begin(identity("a"), 0) == (0, 0)
    assert datasets.begin(identity("a"), 0) == (0, 1)
    assert datasets.begin(identity("b"), 0) == (1, 0)
    again = restored(*datasets.identities)
    assert again.begin(identity("b"), 4) == (1, 0)
    assert again.begin(identity("c"), 4) == (2, 0)  # a loop may take another one later


def test_the_first_dataset_must_be_one_of_the_run():
    with pytest.raises(
        CheckpointError, match=r"of another run(.|\n)*samples_digest': 'a'(.|\n)*data_changes=True"
    ):
        restored(identity("a")).begin(identity("b"), 3)
    begun = OwnDatasets()
    begun.begin(identity("b"), 3)
    with pytest.raises(CheckpointError, match="of another run"):
        begun.restore([identity("a")], PATH)


def test_data_that_change_have_one_number_and_are_compared_by_length_and_order():
    datasets = OwnDatasets()
    assert [datasets.begin(identity(name), step, data_changes=True) for step, name in enumerate("abc")] == [
        (0, 0)
    ] * 3
    assert datasets.identities == [{"num_samples": 8, **ORDER}]
    again = restored(*datasets.identities)
    assert again.begin(identity("d"), 3, data_changes=True) == (0, 0)
    with pytest.raises(CheckpointError, match="'num_samples': 8"):
        restored(*datasets.identities).begin(identity("d", 9), 3, data_changes=True)
    with pytest.raises(CheckpointError, match="of another run"):
        restored(*datasets.identities).begin(identity("a"), 3)


def test_a_run_that_began_without_a_word_of_changes_may_go_on_with_them():
    restored(identity("a"), "of a damaged file").begin(identity("b"), 3, data_changes=True)
    with pytest.raises(CheckpointError, match="of another run"):
        restored(identity("a", 9)).begin(identity("b"), 3, data_changes=True)
