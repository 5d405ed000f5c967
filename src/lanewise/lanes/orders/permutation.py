"""The shuffled order of an epoch: a function of (seed, epoch, position), never a list.

Any slice of any epoch can be asked for directly, so resuming in the middle of an epoch needs no replay, every
process works out its own share without communicating, and a billion samples cost no more memory
than a million.

A shuffled epoch is a keyed Feistel network [1]: it cuts a position into two halves and lets each
scramble the other. Each XOR can be undone, so the whole is a permutation whatever F computes. Four of them
still leave a pattern that the tests can measure; six do not.

    position   [  high  |  low  ]          F(half, key): the leading bits of mix(half + key)
                   |        |
                  XOR <- F -+              one fresh key for each XOR,
                   |        |              from a hash of (seed, epoch)
                   +- F -> XOR
                   |        |
                    (3 times)
                   |        |
    sample     [  high  |  low  ]

The network permutes [0, 2**bits), the smallest power of two that holds all samples. A result outside
[0, num_samples) is permuted again until it falls inside ("cycle walking"), which leaves a permutation of
[0, num_samples) [2]. Each step lands inside with a chance above one half, so the walks are short.

An epoch that fits in one chunk is sorted by pseudo-random keys instead, since halves of only a few bits would
favour some orders over others.

Everything is integer arithmetic modulo 2**64, the same on every platform and with every version of NumPy.

1. M. Luby and C. Rackoff. How to Construct Pseudorandom Permutations from Pseudorandom Functions. SIAM
   Journal on Computing 17(2), 1988.
2. J. Black and P. Rogaway. Ciphers with Arbitrary Finite Domains. CT-RSA 2002.
3. G. L. Steele Jr., D. Lea and C. H. Flood. Fast Splittable Pseudorandom Number Generators. OOPSLA 2014.
"""

import hashlib
from functools import lru_cache
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from lanewise.errors import ConfigError

_Words: TypeAlias = npt.NDArray[np.uint64]

# An order is made in aligned chunks of this many positions. A cycle walk ends with a dozen steps of a few
# positions each, which cost almost nothing but NumPy's overhead per call; shared by only 4,096 positions,
# that overhead was measured to be most of the time. A saved run relies on this number and on the next: they
# decide which epochs are sorted and what their keys are.
CHUNK: Final = 16_384

_ROUNDS: Final = 6

_MAX_SAMPLES: Final = 2**62


@final
class FeistelShuffle:
    """Shuffles every epoch by a keyed Feistel network.

    Args:
        num_samples: how many samples the dataset has, from 0 to 2**62.
        seed: any integer; other seeds give unrelated orders.
    """

    def __init__(self, num_samples: int, *, seed: int) -> None:
        if not 0 <= num_samples <= _MAX_SAMPLES:
            raise ConfigError(
                f"a dataset that is shuffled may have 2**62 samples, not {num_samples}. Let its __len__ say "
                "how many an epoch has, or read them in their order: data.order=sequential."
            )
        self._num_samples = num_samples
        self._seed = seed
        self.chunk = lru_cache(maxsize=1)(self._make_chunk)  # a caller reads on, a few positions at a time

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample indices at positions [start, stop) of the epoch.

        Args:
            epoch: any integer; other epochs have unrelated orders.
            start: the first position, counted from 0.
            stop: the position after the last one, at most `num_samples`.

        Returns:
            A new array of `stop - start` indices.

        Raises:
            ValueError: if the positions are not in the epoch, or `start` is after `stop`.
        """
        if not 0 <= start <= stop <= self._num_samples:
            raise ValueError(f"positions [{start}, {stop}) are not within [0, {self._num_samples})")
        samples = np.empty(stop - start, dtype=np.int64)
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            origin = chunk * CHUNK
            first, last = max(start, origin), min(stop, origin + CHUNK)
            samples[first - start : last - start] = self.chunk(epoch, chunk)[first - origin : last - origin]
        return samples

    def _make_chunk(self, epoch: int, chunk: int) -> npt.NDArray[np.int64]:
        """Return the samples of a chunk of an epoch."""
        keys = words(_ROUNDS, self._seed, epoch)
        stop = min((chunk + 1) * CHUNK, self._num_samples)
        positions = np.arange(chunk * CHUNK, stop, dtype=np.uint64)
        if self._num_samples <= CHUNK:
            return _sorted_by_key(positions, keys[0])
        return _permute(positions, self._num_samples, keys).astype(np.int64)


def permutation(size: int, *of: int | str) -> npt.NDArray[np.int64]:
    """Return [0, size) in a pseudo-random order: a function of `of`, texts and integers of any size."""
    return _sorted_by_key(np.arange(size, dtype=np.uint64), words(1, *of)[0])


def uniform(positions: npt.NDArray[np.int64], *of: int | str) -> npt.NDArray[np.float64]:
    """Return a pseudo-random number in (0, 1) for each position: a function of the position and of `of`."""
    key, other = words(2, *of)
    mixed = _mix(_mix(positions.astype(np.uint64) + key) + other)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def words(count: int, *of: int | str) -> _Words:
    """Hash texts and integers of any size to so many words, at most 8."""
    text = " ".join(map(str, of)).encode()
    digest = hashlib.blake2b(text, digest_size=8 * count, person=b"lanewise.order").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _sorted_by_key(positions: _Words, key: np.uint64) -> npt.NDArray[np.int64]:
    """Sort [0, n) by pseudo-random keys.

    `_mix` is one-to-one, so the keys differ and every way of sorting gives the same order.
    """
    return np.argsort(_mix(positions + key)).astype(np.int64)


def _permute(positions: _Words, num_samples: int, keys: _Words) -> _Words:
    """Permute positions of [0, num_samples) by cycle walking."""
    bits = (num_samples - 1).bit_length()
    samples = _feistel(positions, bits, keys)
    outside = np.flatnonzero(samples >= num_samples)
    while outside.size:
        walked = _feistel(samples[outside], bits, keys)
        samples[outside] = walked
        outside = outside[walked >= num_samples]
    return samples


def _feistel(values: _Words, bits: int, keys: _Words) -> _Words:
    """Permute values of [0, 2**bits); the high half is one bit wider where bits is odd."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low = values & np.uint64(2**low_bits - 1)
    high = values >> np.uint64(low_bits)
    for high_key, low_key in zip(keys[::2], keys[1::2], strict=True):
        high ^= _mix(low + high_key) >> np.uint64(64 - high_bits)
        low ^= _mix(high + low_key) >> np.uint64(64 - low_bits)
    return (high << np.uint64(low_bits)) | low


def _mix(words: _Words) -> _Words:
    """Scramble words in place, each one-to-one, so that their leading bits look random.

    This is SplitMix64's finaliser [3] without its last step, which improves only the trailing bits.
    """
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    return words
