"""What entered the models of programs whose loader tells nothing."""

import pytest

from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.foreign.compare import CannotTellError
from lanewise.commands.verify.foreign.rows import look_at_rows, num_same_rows


def noted(*updates):
    """Note rows and columns of each update."""
    return {"updates": [{"rows": {0: list(rows), 1: list(columns)}} for rows, columns in updates]}


def look(ranks, single):
    found = list(look_at_rows(ranks, single))
    return [one.cause if isinstance(one, Finding) else one for one in found]


def test_rows_that_ranks_share_are_those_of_one_process_in_any_order():
    ranks = [noted(("ab", ""), ("ef", "")), noted(("cd", ""), ("gg", ""))]
    single = noted(("dcba", ""), ("efgh", ""))
    assert num_same_rows(ranks, single) == 1
    assert look(ranks, single) == ["the 4 rows that entered the model in update 1 are those of one process"]


def test_a_batch_that_is_not_the_first_dimension_is_known_by_its_size():
    """As of a language model: the rows of all are as many steps of time, and the columns are shared."""
    ranks = [noted(("xyz", "ab")), noted(("uvw", "cd"))]
    single = noted(("rst", "abcd"))
    assert num_same_rows(ranks, single) == 1
    assert look(ranks, single) == [
        "the 4 columns that entered the model in update 1 are those of one process"
    ]


def test_rows_that_all_ranks_have_are_a_finding_and_others_are_counted():
    ranks = [noted(("ab", "")), noted(("ba", ""))]
    assert look(ranks, noted(("abcd", ""))) == ["ranks read the same samples"]
    with pytest.raises(
        CannotTellError, match=r"of 4 rows .* on 2 processes 2 are among the 4 of one process"
    ):
        num_same_rows(ranks, noted(("abcd", "")))
    assert look([noted(("ab", "")), noted(("ac", ""))], noted(("abcd", ""))) == []


def test_where_no_tensor_entered_nothing_is_said_of_rows():
    ranks = [noted(("", "")), noted(("", ""))]
    assert look(ranks, noted(("", ""))) == []
    with pytest.raises(CannotTellError, match=r"^no loader of torch gave out what was trained on$"):
        num_same_rows(ranks, noted(("", "")))
