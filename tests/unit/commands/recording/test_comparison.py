"""Two recordings are compared part by part, and nothing that only one has is called equal."""

import math

from lanewise.commands.recording.comparison import compare, differing


def of_step(mine, theirs, **given):
    return compare({1: mine}, {1: theirs}, **given)


def test_what_differs_first_in_the_order_of_a_step_is_named_first():
    mine = {"metrics": {"loss": 1.0, "norm": 2.0}, "digests": {"a": "0", "b": "1"}}
    theirs = {"digests": {"b": "2", "a": "0"}, "metrics": {"norm": 3.0, "loss": 1.0}}
    found = of_step(mine, theirs)
    assert {part: one.unequal for part, one in found.differing.items()} == {
        "metrics": {"norm": (2.0, 3.0)},
        "digests": {"b": ("1", "2")},
    }
    assert ([*found.differing], found.num_compared, found.missing) == (["metrics", "digests"], 4, {})


def test_the_part_that_differs_in_the_earliest_step_is_first():
    equal = {"samples": {0: (1,)}, "weights": {"w": "0"}}
    other = {**equal, "weights": {"w": "1", "v": "2"}}
    found = compare(
        {2: equal, 4: equal, 5: equal}, {2: equal, 4: other, 5: {**other, "samples": {0: (1,), 1: (2,)}}}
    )
    assert [*found.differing] == ["weights", "samples"]
    weights, samples = found.differing.values()
    assert (weights.last_equal, weights.first_unequal, str(weights)) == (2, 4, "step 4, w (and 1 more)")
    assert (samples.last_equal, str(samples), samples.values) == (4, "step 5, lane 1", (None, (2,)))


def test_a_name_that_one_part_lacks_differs_and_a_part_that_one_lacks_is_missing():
    found = of_step({"digests": {"a": "0"}, "metrics": {}}, {"digests": {"b": "0"}, "evaluation": {}})
    assert found.parts["digests"].unequal == {"a": ("0", None), "b": (None, "0")}
    assert found.not_compared == ["not compared, as only one has it: metrics, evaluation"]


def test_of_a_part_that_may_have_more_names_those_that_both_have_are_compared():
    mine = {step: {"metrics": {"a": 1, "b": step}} for step in (1, 2)}
    theirs = {step: {"metrics": {"a": 1}} for step in (1, 2)}
    found = compare({**mine, 3: {"metrics": {"b": 3}}}, {**theirs, 3: {"metrics": {}}}, partial=["metrics"])
    assert (found.differing, found.parts["metrics"].last_equal) == ({}, 2)
    assert found.not_compared == ["not compared, as only one has it: b (3 steps)"]


def test_what_only_one_has_of_a_step_is_missing():
    """As of steps before a checkpoint from which the other went on."""
    step = {"digests": {"a": "0"}, "metrics": {"loss": 1.0}}
    found = compare({1: step, 2: step}, {2: step})
    assert found.missing == {"digests": 1, "metrics": 1}
    assert found.parts["digests"].last_equal == 2


def test_values_are_equal_where_their_bits_are():
    assert [*differing({"a": math.nan, "b": 0.0, "c": 1}, {"a": math.nan, "b": -0.0, "c": 1.0})] == ["b", "c"]
