"""`close`: the same samples, random numbers and weights; only rounding differs."""

from dataclasses import replace

import numpy as np
import pytest

from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, configure, train
from tests.slow import slow


def weights(state):
    return np.concatenate([np.frombuffer(values, np.float32) for values in state.values()]).astype(np.float64)


CONFIG = configure(Language, steps=20, equality="close", optimizer="torch.optim.SGD", lr=0.1)


@pytest.fixture(scope="module")
def on_one_process():
    return run_distributed(train, 1, CONFIG)[0]


@pytest.mark.parametrize(
    ("reducer", "world_size", "one_machine"),
    [
        ("ddp", 3, True),
        ("fsdp", 3, True),
        *slow(("ddp", 2, True), ("ddp", 2, False), ("ddp", 4, False)),
    ],
)
def test_twenty_steps_of_sgd_agree(on_one_process, reducer, world_size, one_machine):
    """With dropout, which other libraries draw alike on every rank: there the weights end 0.4 apart."""
    alone, losses = on_one_process
    config = replace(CONFIG, distributed=replace(CONFIG.distributed, reducer=reducer))
    for state, rank_losses in run_distributed(train, world_size, config, one_machine=one_machine):
        difference = np.linalg.norm(weights(state) - weights(alone)) / np.linalg.norm(weights(alone))
        assert difference < 1e-5
        np.testing.assert_allclose(rank_losses, losses, rtol=1e-5)
