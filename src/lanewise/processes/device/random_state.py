"""Sets the random state under which a lane computes or its samples are read.

Everything that may draw random numbers begins under a state of python, numpy and torch that is set in full,
whatever drew before (docs/decisions/0015-seed-always.md).
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lanewise.processes.device import accelerator

_NUM_WORDS = 624


def set_random_state(seed: int) -> None:
    """Seed the default generators of python, numpy and torch, on the CPU and on the current accelerator.

    Args:
        seed: 64 bits; python uses all of them, numpy and torch's CPU generator the lower 32.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)  # noqa: NPY002 - the user's code may draw from the global state
    # Seeding the generator itself takes 1 us; torch.manual_seed also asks every other backend, 60 us.
    torch.default_generator.manual_seed(seed)
    if accelerator.built_for() is not None and (module := accelerator.module_in_use()) is not None:
        module.manual_seed(seed)


def take_random_state() -> Callable[[], None]:
    """Return a function that restores the states that the generators of python, numpy and torch have now.

    Among accelerators it is the one that the thread uses: now, and when the function is called.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    of_torch, of_accelerator = torch.get_rng_state(), accelerator.generator_state()

    def put_back() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        if of_accelerator is not None:
            accelerator.set_generator_state(of_accelerator)

    return put_back


def generator_states() -> dict[str, object]:
    """Return the states of the same generators, by the name of each, to be compared."""
    of_numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    of_accelerator = accelerator.generator_state()
    return {
        "python's generator": random.getstate(),
        "numpy's generator": repr(
            of_numpy | {"state": {**of_numpy["state"], "key": of_numpy["state"]["key"].tobytes()}}
        ),
        "torch's generator": torch.get_rng_state().tolist(),
        "the accelerator's generator": None if of_accelerator is None else of_accelerator.tolist(),
    }


def host_generators_drew() -> dict[str, bool]:
    """Tell of each of these generators of the host whether it gave a number since it was seeded.

    Those of python and numpy make 624 words at a time, and begin behind the last one.
    """
    of_numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    seeded = torch.Generator().manual_seed(torch.initial_seed())
    return {
        "python's generator": random.getstate()[1][-1] != _NUM_WORDS,
        "numpy's generator": of_numpy["state"].get("pos", _NUM_WORDS) != _NUM_WORDS,
        "torch's generator": not torch.equal(torch.get_rng_state(), seeded.get_state()),
    }


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the random state back afterwards, in the same generators."""
    put_back = take_random_state()
    try:
        yield
    finally:
        put_back()
