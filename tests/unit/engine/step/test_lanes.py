"""How a lane's batch reaches the device."""

import pytest
import torch

from lanewise.data import LaneBatch
from lanewise.engine.step import lanes
from lanewise.lanes import LaneTurn

TURN = LaneTurn(epoch=0, step=0, lane=0, positions=range(2), present=range(1), is_last=True)


def test_batches_reach_an_accelerator_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "new_stream", lambda _device: None)
    batches = [LaneBatch(TURN, (0, 1), {"x": torch.ones(2, 3)}, 2)]
    (moved,) = lanes.to_device(batches, torch.device("meta"))
    assert moved.data["x"].is_meta
    assert moved.indices == (0, 1)
    assert list(lanes.to_device(batches, torch.device("cpu"))) == batches
