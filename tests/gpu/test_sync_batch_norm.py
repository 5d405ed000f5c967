"""torch's own SyncBatchNorm, in two processes; where there is one GPU, they share it over gloo."""

from tests.unit.engine.transforms.test_sync_batch_norm import (
    check_lanes_in_turn,
    check_lanes_that_are_normalised_together,
)


def test_lanes_that_run_at_once_are_normalised_together(device):
    check_lanes_that_are_normalised_together(device.run)


def test_lanes_in_turn_end_with_one_model(device):
    check_lanes_in_turn(device.run)
