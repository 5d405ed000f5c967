"""Samples that a dataset gives as None."""

import pytest

from lanewise.data.missing import present
from lanewise.errors import DataError


def test_what_is_there_stays_as_it_is():
    samples = (0, "", [])
    assert present(samples, (4, 5, 6), "error", "") == (samples, ())


def test_those_that_are_none_are_left_out_and_their_places_told():
    assert present([None, 1, None], (7, 8, 9), "skip", "") == ([1], (0, 2))


@pytest.mark.parametrize(
    ("eval_dataset", "of"), [("", "training data"), ("held_out", "eval dataset held_out")]
)
def test_an_error_names_the_first_one_and_both_remedies(eval_dataset, of):
    with pytest.raises(DataError, match=rf"sample 8 of the {of} is None.*lack a return.*data.missing=skip"):
        present([1, None, None], (7, 8, 9), "error", eval_dataset)
