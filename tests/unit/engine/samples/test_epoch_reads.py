"""The console hears of what was read where it is not just everything."""

import logging
from types import SimpleNamespace

import pytest
import torch

from lanewise.engine.samples.epoch_reads import EpochReads
from lanewise.processes.world.world import LocalWorld


@pytest.mark.parametrize(
    ("read_bytes", "num_samples", "said"),
    [
        (2_000_000, 4, []),
        (3_000_000, 4, ["epoch 1: 3 MB read of 2 MB"]),
        (2_000_000, 3, ["epoch 1: 2 MB read of 2 MB, and 1 samples left out, as they cannot be read"]),
    ],
)
def test_a_line_says_what_was_read_unless_it_was_everything(caplog, read_bytes, num_samples, said):
    caplog.set_level(logging.INFO)
    reads = EpochReads(LocalWorld(torch.device("cpu")), 2_000_000)
    turn = SimpleNamespace(positions=(0, 1, 2, 3))
    batch = SimpleNamespace(read_bytes=read_bytes, turn=turn, indices=[0, 1, 2, 3], num_samples=num_samples)
    assert list(reads.count(iter([batch]))) == [batch]
    assert reads.take(0)["data/read_bytes"] == read_bytes
    assert caplog.messages == said
