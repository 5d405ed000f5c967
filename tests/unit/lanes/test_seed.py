"""Seeds are fixed functions of where they are used, and all different."""

import itertools

import pytest

from lanewise.lanes import (
    backward_seed,
    batch_loss_seed,
    lane_seed,
    metric_seed,
    model_seed,
    read_seed,
    sample_seed,
    update_seed,
)


@pytest.mark.parametrize(
    ("seed", "golden"),
    [
        (model_seed(0), 0xFCA04C755DCDC03E),
        (model_seed(-1), 0x6EC30E351A547D71),
        (lane_seed(0, 0, 0), 0x3426D6F37C95A5BE),
        (lane_seed(1, 2, 3), 0xD66AB04D71B977BE),
        (sample_seed(0, 0, 0), 0xFC3917387C2D509D),
        (sample_seed(1, 2, 3), 0xA8523A51D25CBAB0),
        (read_seed(0, (0, 0), "", 0, 0, 0), 0x70FF5AF5624AF61C),
        (read_seed(1, (2, 3), "test", 4, 5, 6), 0x5D3572363F5363FE),
        (metric_seed(0, "test"), 0xD406450F00D8CCBE),
        (lane_seed(1, 2, 3, 4), 0xE3D81DED8164C2C7),
        (update_seed(1, 2), 0xE5699557B9AD3BFC),
        (update_seed(1, 2, 3), 0xC6526D81D027D48C),
        (backward_seed(1, 2, 3), 0xBF070E88F331FFDD),
        (batch_loss_seed(1, 2), 0x0E92B9399D6C09B6),
        (batch_loss_seed(1, 2, 3), 0x8D0F18A4EF51C2F0),
        (batch_loss_seed(1, 2, 3, "evaluation"), 0x293042F1CA499D78),
    ],
)
def test_seeds_never_change(seed, golden):
    assert seed == golden, "raise _RANDOM_NUMBERS in engine/state/resume_check.py, and write the digests anew"


def grid() -> list[int]:
    """The seeds of all purposes for neighbouring runs, steps or epochs, and lanes or samples."""

    def read(seed: int, step: int, lane: int) -> int:
        return read_seed(seed, (0, 0), "", step // 5, step, lane)

    seeds = [
        purpose(*numbers)
        for purpose in (lane_seed, sample_seed, read)
        for numbers in itertools.product(range(4), range(40), range(40))
    ]
    updates = [update_seed(*numbers) for numbers in itertools.product(range(4), range(40))]
    return seeds + updates + [model_seed(seed) for seed in range(1000)]


def test_no_two_seeds_are_equal():
    seeds = grid()
    assert len(set(seeds)) == len(seeds) == 20_360


def test_numbers_do_not_run_into_each_other():
    seeds = [lane_seed(1, 23, 4), lane_seed(12, 3, 4), lane_seed(1, 2, 34), lane_seed(1, 3, 24)]
    assert len(set(seeds)) == 4


def test_every_one_of_64_bits_is_used():
    seeds = grid()
    assert all(0 <= seed < 2**64 for seed in seeds)
    for bit in range(64):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert abs(share - 0.5) < 0.02, f"bit {bit} is set in {share:.3f} of the seeds"


def test_the_lower_half_alone_tells_neighbours_apart():
    lower = [sample_seed(0, 0, index) & 0xFFFF_FFFF for index in range(1000)]  # what numpy gets
    assert len(set(lower)) == 1000


@pytest.mark.parametrize("seed", [-(10**30), -1, 2**64, 10**30])
def test_a_run_may_have_any_integer_as_its_seed(seed):
    assert 0 <= sample_seed(seed, 0, 2**62) < 2**64
    assert sample_seed(seed, 0, 0) != sample_seed(seed % 2**64, 0, 0)
