"""Two recordings of a step are compared part by part, and nothing that only one has is called equal."""

import math

from lanewise.commands.replay.comparison import compare, differing


def test_what_differs_first_in_the_order_of_a_step_is_named_first():
    mine = {"metrics": {"loss": 1.0, "norm": 2.0}, "digests": {"a": "0", "b": "1"}}
    theirs = {"digests": {"b": "2", "a": "0"}, "metrics": {"norm": 3.0, "loss": 1.0}}
    found = compare(mine, theirs)
    assert [*found.differing.items()] == [("norm", (2.0, 3.0)), ("b", ("1", "2"))]
    assert (found.parts, found.num_compared, found.missing) == (["metrics", "digests"], 4, [])


def test_a_name_that_one_part_lacks_differs_and_a_part_that_one_lacks_is_missing():
    found = compare({"digests": {"a": "0"}, "metrics": {}}, {"digests": {"b": "0"}, "evaluation": {}})
    assert found.differing == {"a": ("0", None), "b": (None, "0")}
    assert found.missing == ["metrics", "evaluation"]


def test_values_are_equal_where_their_bits_are():
    assert [*differing({"a": math.nan, "b": 0.0, "c": 1}, {"a": math.nan, "b": -0.0, "c": 1.0})] == ["b", "c"]
