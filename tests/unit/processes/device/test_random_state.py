"""One seed sets the default generators of python, numpy and torch."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lanewise.processes.device import random_state
from lanewise.processes.device.random_state import host_generators_drew, kept_random_state, set_random_state


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
    module = SimpleNamespace(manual_seed=seeds.append)
    monkeypatch.setattr(random_state.accelerator, "built_for", lambda: module)
    monkeypatch.setattr(random_state.accelerator, "module_in_use", lambda: module)
    set_random_state(2**63 + 5)
    assert seeds == [2**63 + 5]


def test_a_kept_state_goes_on_where_it_was():
    first = draw(7)
    set_random_state(7)
    with kept_random_state():
        draw(8)
    assert (random.random(), float(np.random.random_sample()), torch.rand(()).item()) == first  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_generator_of_the_host_that_gave_a_number_is_told(seed):
    draws = (random.random, np.random.standard_normal, lambda: torch.rand(1))
    for drawing, draw_number in enumerate(draws):
        set_random_state(seed)
        assert not any(host_generators_drew().values())
        draw_number()
        assert [number for number, has_drawn in enumerate(host_generators_drew().values()) if has_drawn] == [
            drawing
        ]
