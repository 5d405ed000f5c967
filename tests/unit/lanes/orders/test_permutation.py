"""The order of an epoch is a permutation, can be entered anywhere, never changes, and looks random.

The tests of quality compare counts with what fair shuffling gives, by a chi-square turned into a z-score:
about standard normal if the shuffling is fair, far above if it is not. Tests of bad shuffling show that each
statistic would notice. All seeds are fixed, so a test that passes once passes always.
"""

import itertools
import math
import tracemalloc
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.errors import ConfigError
from lanewise.lanes import FeistelShuffle
from lanewise.lanes.orders import permutation as feistel
from tests.slow import slow

Ints: TypeAlias = npt.NDArray[np.int64]

FAIR = 4.0  # |z| of fair shuffling stays below: one in 16,000 would not
UNFAIR = 8.0  # z of every bad shuffling here lies above

# Sizes on both sides of one chunk, where the construction changes, and beyond several.
SIZES = st.one_of(st.integers(0, 5_000), st.integers(feistel.CHUNK - 2, 4 * feistel.CHUNK + 2))
WORDS = st.integers(0, 2**63 - 1)


@settings(deadline=None, derandomize=True)
@given(num_samples=SIZES, seed=WORDS, epoch=WORDS)
def test_every_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    samples = FeistelShuffle(num_samples, seed=seed).indices(epoch, 0, num_samples)
    assert samples.dtype == np.int64
    np.testing.assert_array_equal(np.sort(samples), np.arange(num_samples))


@settings(deadline=None, derandomize=True)
@given(data=st.data(), num_samples=SIZES)
def test_any_slice_equals_that_slice_of_the_whole(data: st.DataObject, num_samples: int) -> None:
    whole = FeistelShuffle(num_samples, seed=3).indices(5, 0, num_samples)
    reader = FeistelShuffle(num_samples, seed=3)
    for _ in range(3):
        start = data.draw(st.integers(0, num_samples))
        stop = data.draw(st.integers(start, num_samples))
        np.testing.assert_array_equal(reader.indices(5, start, stop), whole[start:stop])


def test_epochs_can_be_read_in_turns() -> None:
    reader = FeistelShuffle(50_000, seed=3)
    for epoch, start in [(0, 0), (1, 0), (0, 20_000), (1, 20_000), (0, 0)]:
        fresh = FeistelShuffle(50_000, seed=3).indices(epoch, start, start + 32)
        np.testing.assert_array_equal(reader.indices(epoch, start, start + 32), fresh)


def test_the_caller_owns_the_result() -> None:
    reader = FeistelShuffle(100, seed=3)
    before = reader.indices(0, 0, 100).tolist()
    reader.indices(0, 0, 100).fill(-1)
    assert reader.indices(0, 0, 100).tolist() == before


@pytest.mark.parametrize("num_samples", [1_000, 65_536])
def test_other_seeds_and_epochs_give_other_orders(num_samples: int) -> None:
    seeds_and_epochs = itertools.product([0, 1, 11, -1, 2**63, 2**64, 2**64 + 1], [0, 1, 2, 11, 12, 2**40])
    orders = {tuple(FeistelShuffle(num_samples, seed=s).indices(e, 0, 8)) for s, e in seeds_and_epochs}
    assert len(orders) == 7 * 6


# These values must never change: runs that were saved before the change could not be resumed after it.
@pytest.mark.parametrize(
    ("num_samples", "seed", "epoch", "start", "samples"),
    [
        (5, 0, 0, 0, [0, 3, 2, 1, 4]),
        (1_000, 0, 1, 0, [356, 779, 676, 259, 890, 266]),
        (1_000, 2**63 - 1, 1, 994, [812, 36, 134, 501, 597, 175]),
        (65_536, 0, 0, 16_381, [45_917, 44_491, 57_504, 28_029, 37_398, 49_813]),
        (1_281_167, 42, 89, 1_281_161, [677_610, 1_084_215, 654_193, 1_108_966, 353_634, 824_351]),
        (10**9, 1234, 0, 0, [74_472_349, 551_891_146, 505_581_885, 23_886_556, 330_392_687, 374_922_812]),
        (2**62, 0, 7, 2**62 - 2, [516_581_850_063_095_041, 1_488_576_439_853_852_503]),
    ],
)
def test_orders_never_change(num_samples: int, seed: int, epoch: int, start: int, samples: list[int]) -> None:
    assert (
        FeistelShuffle(num_samples, seed=seed).indices(epoch, start, start + len(samples)).tolist() == samples
    )


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 11), (11, 11), (7, 6), (-2, -1)])
def test_positions_outside_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"positions \[{start}, {stop}\) are not within \[0, 10\)"):
        FeistelShuffle(10, seed=0).indices(0, start, stop)


@pytest.mark.parametrize("num_samples", [-1, 2**62 + 1])
def test_impossible_sizes_are_refused(num_samples: int) -> None:
    with pytest.raises(ConfigError, match=f"not {num_samples}.*data.order=sequential"):
        FeistelShuffle(num_samples, seed=0)


def test_a_billion_samples_take_little_memory() -> None:
    tracemalloc.start()
    try:
        FeistelShuffle(10**9, seed=0).indices(0, 999_999_000, 999_999_032)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**20


@pytest.mark.parametrize("num_samples", [2**31 + 1, 2**61 + 1, 2**62 - 1, 2**62])
def test_huge_epochs_stay_within_the_dataset(num_samples: int) -> None:
    reader = FeistelShuffle(num_samples, seed=0)
    for start in [0, num_samples // 2, num_samples - 5_000]:
        samples = reader.indices(0, start, start + 5_000)
        assert len(np.unique(samples)) == 5_000
        assert 0 <= samples.min() < num_samples // 100
        assert num_samples - num_samples // 100 < samples.max() < num_samples


def z_score(chi_square: float, freedom: int) -> float:
    """A chi-square as a z-score (E. B. Wilson and M. M. Hilferty, The Distribution of Chi-Square, 1931)."""
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def z_uniform(values: Ints, num_values: int) -> float:
    """Whether each of `range(num_values)` is equally likely."""
    counts = np.bincount(values, minlength=num_values)
    expected = len(values) / num_values
    return z_score(np.sum((counts - expected) ** 2) / expected, num_values - 1)


def z_dependence(pairs: list[tuple[Ints, Ints]], num_samples: int) -> float:
    """Whether x says something about y, for pairs of arrays with values in `range(num_samples)`.

    Each pair of arrays is counted by itself: a pattern that differs between epochs must not average out.
    """
    bins = 16
    chi_square = 0.0
    for x, y in pairs:
        cells = (x * bins // num_samples) * bins + y * bins // num_samples
        table = np.bincount(cells, minlength=bins**2).reshape(bins, bins)
        expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True) / table.sum()
        chi_square += np.sum((table - expected) ** 2 / expected)
    return z_score(chi_square, len(pairs) * (bins - 1) ** 2)


def z_permutations(orders: list[Ints]) -> float:
    """Whether each permutation of a few samples is equally likely."""
    num_samples = len(orders[0])
    rank = {p: i for i, p in enumerate(itertools.permutations(range(num_samples)))}
    return z_uniform(np.array([rank[tuple(o.tolist())] for o in orders]), len(rank))


def epochs(num_samples: int, count: int, *, seed: int = 0) -> list[Ints]:
    reader = FeistelShuffle(num_samples, seed=seed)
    return [reader.indices(epoch, 0, num_samples) for epoch in range(count)]


def dependences(orders: list[Ints]) -> dict[str, float]:
    """A z-score for each kind of pattern that a bad order could show."""
    num_samples = len(orders[0])
    # At this distance positions share their low halves, where a Feistel network of few rounds is weakest.
    distances = {1, 2, 32, 2 ** ((num_samples - 1).bit_length() // 2)}
    positions = np.arange(num_samples)
    pairs = {f"samples {d} apart": [(o[:-d], o[d:]) for o in orders] for d in distances}
    pairs["position and sample"] = [(positions, o) for o in orders]
    pairs["epoch and next epoch"] = list(itertools.pairwise(orders))
    return {name: z_dependence(arrays, num_samples) for name, arrays in pairs.items()}


@pytest.mark.parametrize("num_samples", [2, 5, *slow(3, 4, 7)])
def test_all_orders_of_a_few_samples_are_equally_likely(num_samples: int) -> None:
    count = 20_000
    over_epochs = epochs(num_samples, count)
    over_seeds = [FeistelShuffle(num_samples, seed=seed).indices(0, 0, num_samples) for seed in range(count)]
    assert abs(z_permutations(over_epochs)) < FAIR
    assert abs(z_permutations(over_seeds)) < FAIR


def test_consecutive_epochs_of_a_few_samples_are_independent() -> None:
    codes = np.array([9 * o[0] + 3 * o[1] + o[2] for o in epochs(3, 20_000)])
    _, which = np.unique(codes, return_inverse=True)
    assert abs(z_uniform(6 * which[:-1] + which[1:], 36)) < FAIR


@pytest.mark.parametrize("num_samples", [100, 1_009, *slow(1_000, 20_011, 65_536, 65_537)])
@pytest.mark.parametrize("place", ["first", "last"])
def test_each_position_gets_each_sample_equally_often(num_samples: int, place: str) -> None:
    start = 0 if place == "first" else num_samples - 4
    reader = FeistelShuffle(num_samples, seed=0)
    samples = np.stack([reader.indices(epoch, start, start + 4) for epoch in range(500)])
    for at_one_position in samples.T:
        assert abs(z_uniform(at_one_position * 25 // num_samples, 25)) < FAIR


@pytest.mark.parametrize("num_samples", [1_000, 16_411, 65_536, *slow(1_009, 16_384, 65_537, 100_003, 2**18)])
def test_an_order_shows_no_pattern(num_samples: int) -> None:
    found = dependences(epochs(num_samples, 20))
    assert max(abs(z) for z in found.values()) < FAIR, found


def test_seeds_next_to_each_other_give_independent_orders() -> None:
    orders = [FeistelShuffle(65_536, seed=seed).indices(0, 0, 65_536) for seed in range(20)]
    assert abs(z_dependence(list(itertools.pairwise(orders)), 65_536)) < FAIR


@pytest.mark.parametrize("num_samples", [65_536, *slow(100_003, 2**18)])
@pytest.mark.parametrize("rounds", [2, 4])
def test_too_few_rounds_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, num_samples: int, rounds: int
) -> None:
    monkeypatch.setattr(feistel, "_ROUNDS", rounds)
    assert max(dependences(epochs(num_samples, 20)).values()) > UNFAIR


def test_no_shuffling_would_be_noticed() -> None:
    assert min(dependences([np.arange(1_000)] * 2).values()) > UNFAIR


def test_a_network_of_a_few_bits_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feistel, "CHUNK", 4)
    assert z_permutations(epochs(5, 5_000)) > UNFAIR
