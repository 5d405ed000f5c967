"""Numbers that matter where a few runs don't get."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lanewise.verify.hidden import numbers
from lanewise.verify.number import numbers_that_matter


def found(state: SimpleNamespace, step, matters) -> list[str]:
    """Return the names, of runs that take a step and tell whether what matters is so."""

    def run() -> bool:
        step(state)
        return not matters(state)

    before = {name: one.value for name, one in numbers(nn.Linear(1, 1), state=state).items()}
    names = numbers_that_matter(lambda: numbers(nn.Linear(1, 1), state=state), run)
    after = {name: one.value for name, one in numbers(nn.Linear(1, 1), state=state).items()}
    # Runs went on counting, and what was far off is back.
    assert all(abs(after[name] - value) < 99 for name, value in before.items())
    return names


def count(state: SimpleNamespace) -> None:
    state.count += 1
    state.seen["samples"] += 4
    state.steps += 1


@pytest.mark.parametrize(
    ("matters", "names"),
    [
        (lambda state: state.level == 3.0, []),
        (lambda state: state.count % 1000 == 0, ["state.count"]),
        (lambda state: state.count % 100 == 99, ["state.count"]),
        (lambda state: state.steps > 10_000, ["state.steps"]),
        (lambda state: state.seen["samples"] % 512 == 0, ["state.seen.samples"]),
        (lambda state: state.level != 2.0, []),
    ],
)
def test_counters_that_act_rarely_are_named(matters, names):
    state = SimpleNamespace(count=5, seen={"samples": 8}, steps=torch.tensor(5), level=2.0)
    assert found(state, count, matters) == names


def test_levels_that_act_beyond_a_limit_are_named_and_what_is_set_anew_is_not():
    def learn(state: SimpleNamespace) -> None:
        state.level = 0.99 * state.level + 0.01
        state.last = state.level + state.number
        state.number += 1
        state.last = 0.5

    state = SimpleNamespace(level=0.0, last=1.0, number=0)
    assert found(state, learn, lambda state: state.level < -5) == ["state.level"]
    assert found(state, learn, lambda state: state.last != 0.5) == []


def test_what_such_a_number_breaks_is_not_called_a_cause():
    def fail(state: SimpleNamespace) -> None:
        state.count += 1
        [0] * 8 if state.count < 100 else {}["no such key"]

    assert found(SimpleNamespace(count=0, level=0), fail, lambda state: state.level) == []
