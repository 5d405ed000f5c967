"""One seed sets the default generators of python, numpy and torch."""

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from lanewise import random_state
from lanewise.random_state import SeededCalls, kept_random_state, set_random_state, was_drawn_from


def draw(seed: int) -> tuple[float, float, float]:
    set_random_state(seed)
    return random.random(), float(np.random.random_sample()), torch.rand(()).item()  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_equal_seeds_draw_equally_whatever_came_before(seed):
    first = draw(seed)
    draw(seed + 1 if seed < 2**64 - 1 else 0)
    random.gauss(0, 1)  # leaves half a pair behind
    np.random.standard_normal()  # noqa: NPY002 - so does this
    torch.randn(3)
    assert draw(seed) == first


@pytest.mark.parametrize(("seed", "other"), [(0, 1), (2**63, 2**63 + 1), (2**64 - 1, 2**64 - 2)])
def test_all_three_generators_follow_the_seed(seed, other):
    assert all(a != b for a, b in zip(draw(seed), draw(other), strict=True))


def test_half_a_pair_of_normal_numbers_is_forgotten():
    def normals():
        set_random_state(7)
        return random.gauss(0, 1), float(np.random.standard_normal()), torch.randn(()).item()  # noqa: NPY002

    first = normals()
    assert normals() == first


def test_python_uses_all_64_bits_and_numpy_the_lower_32():
    python, numpys, _ = draw(5)
    high_python, high_numpys, _ = draw(5 + 2**63)
    assert numpys == high_numpys
    assert python != high_python


def test_the_accelerator_is_seeded_too(monkeypatch):
    seeds = []
    monkeypatch.setattr(random_state, "seed_accelerator", seeds.append)
    set_random_state(2**63 + 5)
    assert seeds == [2**63 + 5]


def test_a_kept_state_goes_on_where_it_was():
    first = draw(7)
    set_random_state(7)
    with kept_random_state():
        draw(8)
    assert (random.random(), float(np.random.random_sample()), torch.rand(()).item()) == first  # noqa: NPY002


def test_a_call_that_draws_late_is_made_again_under_its_seed():
    """Until then nothing but torch is seeded; afterwards everything is."""
    drawn = []

    def call(seed: Callable[[int], None], number: int) -> float:
        seed(number + 3)
        drawn.append(number)
        return random.random() if number > 1 else torch.rand(()).item()

    calls = SeededCalls()
    values = [calls(partial(call, number=number)) for number in range(4)]
    assert drawn == [0, 1, 2, 2, 3]
    for value, seed in zip(values[2:], (5, 6), strict=True):
        set_random_state(seed)
        assert value == random.random()


@pytest.mark.parametrize(
    "draw_from",
    [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.random_sample,
        lambda: [random.getrandbits(32) for _ in range(624)],
        lambda: np.random.random_sample(312),  # noqa: NPY002
    ],
)
def test_a_draw_is_seen_even_of_as_many_words_as_a_generator_makes_at_once(draw_from):
    set_random_state(7)
    torch.rand(3)
    assert not was_drawn_from()
    draw_from()
    assert was_drawn_from()


def test_generators_whose_state_is_not_where_it_is_expected_are_always_seeded(monkeypatch):
    monkeypatch.setattr(random_state, "_words", lambda: None)
    set_random_state(7)
    assert was_drawn_from()
    calls = SeededCalls()

    def call(seed: Callable[[int], None]) -> float:
        seed(7)
        return random.random()

    assert len({calls(call) for _ in range(3)}) == 1


def test_a_draw_before_the_last_seed_of_the_first_call_is_seen_too():
    """As of the first sample of a micro-batch: only a look at the end would miss it."""

    def call(seed: Callable[[int], None], number: int) -> float:
        seed(number)
        value = random.random()
        seed(number + 100)
        return value

    calls = SeededCalls()
    num_calls = []
    for number in range(3):
        calls(lambda seed, number=number: (num_calls.append(number), call(seed, number)))
    assert num_calls == [0, 1, 2]


def test_a_generator_that_the_user_gave_numpy_is_always_seeded():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.MT19937(1))
        set_random_state(7)
        assert was_drawn_from()
    finally:
        np.random.set_bit_generator(before)
    set_random_state(7)
    assert not was_drawn_from()
