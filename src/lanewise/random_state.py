"""Sets the random state under which a lane computes or a sample is read.

[Note: seeding what draws]
Seeding torch's generator takes 1 us, numpy's 2 and python's 4, and most samples and forwards draw from
torch's alone. So python's and numpy's are left as they are as long as nobody draws from them. A call that
does is seen by their state, and made once more under its seed; from then on they are seeded for every call of
its kind. What a call returns is the same either way.
"""

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from lanewise.world.accelerator import seed_accelerator, take_generator

T = TypeVar("T")


def set_random_state(seed: int) -> None:
    """Seed the default generators of python, numpy and torch, on the CPU and on the current accelerator.

    Args:
        seed: 64 bits; python uses all of them, numpy and torch's CPU generator the lower 32.
    """
    global _seeded  # noqa: PLW0603 - the generators are the process's
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)  # noqa: NPY002 - the user's code may draw from the global state
    _seeded = _words()
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's default generators alone: the CPU's and the current accelerator's."""
    # Seeding the generator itself takes 1 us; torch.manual_seed also asks every other backend, 60 us.
    torch.default_generator.manual_seed(seed)
    seed_accelerator(seed)


def was_drawn_from() -> bool:
    """Tell whether python's or numpy's generator is other than `set_random_state` left it."""
    return _words() != _seeded or _seeded is None


class SeededCalls:
    """Makes calls of one kind, which seed as they go on. See [Note: seeding what draws]."""

    def __init__(self) -> None:
        self._draw: bool | None = None
        """Whether some call drew from python's or numpy's generator; None before the first one."""

    def __call__(self, call: Callable[[Callable[[int], None]], T]) -> T:
        """Call a function with what it must seed by; a second time where it is the first to draw."""
        if self._draw is None:
            return self._call_first(call)
        if not self._draw and not was_drawn_from():
            result = call(seed_torch)
            if not was_drawn_from():
                return result
            self._draw = True
        return call(set_random_state)

    def _call_first(self, call: Callable[[Callable[[int], None]], T]) -> T:
        """Seed everything, and look each time whether something drew before."""
        drew = False

        def seed(number: int) -> None:
            nonlocal drew
            drew |= was_drawn_from()
            set_random_state(number)

        set_random_state(0)  # what others drew does not count
        result = call(seed)
        self._draw = drew or was_drawn_from()
        return result


def take_random_state() -> Callable[[], None]:
    """Return what puts python's, numpy's and torch's generators back to where they are now.

    Of accelerators this is the one that the thread uses.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    of_torch, set_generator = torch.get_rng_state(), take_generator()

    def put_back() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        set_generator()

    return put_back


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the random state back afterwards, in the same generators."""
    put_back = take_random_state()
    try:
        yield
    finally:
        put_back()


def _find_words() -> Callable[[], tuple[int, int] | None]:
    """Return a function that returns a pair of words of each generator's state; None if they cannot be found.

    Both generators are Mersenne Twisters, of 624 words and a position. A draw moves the position, and each
    624th one makes new words. So the position and the word beside it in memory tell of every draw. CPython
    keeps the position before the words, behind the object's header; numpy keeps it after them.
    """
    get_generator = np.random.get_bit_generator  # type: ignore[attr-defined]
    generator = get_generator()
    pythons = id(random.seed.__self__) + object.__basicsize__  # type: ignore[attr-defined]
    pair_of_python = ctypes.c_uint64.from_address(pythons)
    pair_of_numpy = ctypes.c_uint64.from_address(generator.ctypes.state_address + 4 * 623)

    def words() -> tuple[int, int] | None:
        if get_generator() is not generator:  # replaced by the user
            return None
        return pair_of_python.value, pair_of_numpy.value

    _, of_python, _ = random.getstate()
    of_numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    pairs = (of_python[-1], of_python[0]), (of_numpy["key"][-1], of_numpy["pos"])
    expected = tuple(int(np.array(pair, dtype=np.uint32).view(np.uint64)[0]) for pair in pairs)
    return words if words() == expected else lambda: None


_words = _find_words()
_seeded: tuple[int, int] | None = None
"""What `_words` returned after the last `set_random_state`."""
