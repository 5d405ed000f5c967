"""The gradient is the weighted mean over the global batch, for any split into lanes and processes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lanewise.config import DistributedConfig
from lanewise.lanes import FeistelShuffle
from lanewise.testing import run_distributed
from tests.distributed.tasks import MeanOfMeans, Smooth, configure, gradients
from tests.slow import slow

MICRO_BATCH_SIZE = 4


def full_batch_gradient(num_samples: int, global_batch_size: int) -> dict[str, torch.Tensor]:
    """One forward over the whole first global batch, without lanewise; the weights are those of a run."""
    from lanewise.engine.engine import build_engine
    from lanewise.processes.world.world import LocalWorld

    config = configure(Smooth, num_lanes=1, micro_batch_size=global_batch_size, num_samples=num_samples)
    model = build_engine(config, LocalWorld(torch.device("cpu"))).training.model
    samples = Smooth(num_samples).train_dataset()
    indices = FeistelShuffle(num_samples, seed=0).indices(0, 0, min(num_samples, global_batch_size))
    batch = nn.utils.rnn.pad_sequence([samples[int(index)] for index in indices], batch_first=True)
    targets = batch[:, 1:].flatten()
    F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), targets, ignore_index=0).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


SPLITS = [
    pytest.param(
        world_size,
        lanes_each,
        equality,
        marks=() if (world_size + turn) % 2 and world_size % 4 == lanes_each % 4 else pytest.mark.slow,
    )
    for world_size in (1, 2, 3, 4)
    for lanes_each in (1, 2, 3)
    for turn, equality in enumerate(("close", "exact"))
]
"""Of which `make test` runs half, in which any two values meet."""


@pytest.mark.parametrize(("world_size", "lanes_each", "equality"), SPLITS)
def test_ragged_token_weights_give_the_full_batch_gradient(world_size, lanes_each, equality):
    num_lanes = world_size * lanes_each
    num_samples = num_lanes * MICRO_BATCH_SIZE - 1  # ragged also in samples
    config = configure(
        Smooth,
        num_lanes=num_lanes,
        micro_batch_size=MICRO_BATCH_SIZE,
        steps=1,
        equality=equality,
        optimizer="torch.optim.SGD",
        num_samples=num_samples,
    )
    expected = full_batch_gradient(num_samples, num_lanes * MICRO_BATCH_SIZE)
    for (gradient,) in run_distributed(gradients, world_size, config):
        for name, value in expected.items():
            torch.testing.assert_close(gradient[name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("equality", "num_samples"),
    [("close", 5), ("exact", 13), *slow(("close", 13), ("close", 24), ("exact", 5), ("exact", 24))],
)
def test_batches_that_fsdp_borrows_count_for_nothing(num_samples, equality):
    """Two, four and six of six lanes on three processes, each of which runs two forwards."""
    config = configure(
        Smooth,
        num_lanes=6,
        micro_batch_size=MICRO_BATCH_SIZE,
        steps=1,
        optimizer="torch.optim.SGD",
        num_samples=num_samples,
    )
    config = replace(config, distributed=DistributedConfig(reducer="fsdp", equality=equality))
    expected = full_batch_gradient(num_samples, 24)
    for (gradient,) in run_distributed(gradients, 3, config):
        for name, value in expected.items():
            torch.testing.assert_close(gradient[name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mean_of_means_does_not(world_size):
    options = {"num_lanes": 4, "micro_batch_size": MICRO_BATCH_SIZE, "steps": 1, "num_samples": 16}
    config = configure(MeanOfMeans, optimizer="torch.optim.SGD", **options)
    expected = full_batch_gradient(16, 16)
    (gradient,) = run_distributed(gradients, world_size, config)[0]
    name, value = next(iter(expected.items()))
    assert (gradient[name] - value).norm() > 1e-3 * value.norm()
