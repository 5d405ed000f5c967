"""torch's own SyncBatchNorm, in two processes that share one card over gloo."""

import pytest

from tests.unit.engine.transforms.test_sync_batch_norm import (
    check_lanes_in_turn,
    check_lanes_that_are_normalised_together,
)

pytestmark = pytest.mark.gpu


def test_lanes_that_run_at_once_are_normalised_together():
    check_lanes_that_are_normalised_together("cuda:0")


def test_lanes_in_turn_end_with_one_model():
    check_lanes_in_turn("cuda:0")
