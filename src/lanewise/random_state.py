"""Sets the random state under which a lane computes or a sample is read."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lanewise.world.accelerator import kept_generator, seed_accelerator


def set_random_state(seed: int) -> None:
    """Seed the default generators of python, numpy and torch, on the CPU and on the current accelerator.

    Args:
        seed: 64 bits; python uses all of them, numpy and torch's CPU generator the lower 32.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)  # noqa: NPY002 - the user's code may draw from the global state
    # Seeding the generator itself takes 1 us; torch.manual_seed also asks every other backend, 60 us.
    torch.default_generator.manual_seed(seed)
    seed_accelerator(seed)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the random state back afterwards, in the same generators."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    of_torch = torch.get_rng_state()
    with kept_generator():
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
            torch.set_rng_state(of_torch)
