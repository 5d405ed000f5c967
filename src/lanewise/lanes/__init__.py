"""Lanes as pure integers: who carries them, what they read, how their sums meet, which seeds they use."""

from lanewise.lanes.orders.blocked import BlockedOrder
from lanewise.lanes.orders.bucketed import BucketedOrder
from lanewise.lanes.orders.order import OrderInputs, SampleOrder, SequentialOrder, ShuffledOrder
from lanewise.lanes.orders.permutation import FeistelShuffle
from lanewise.lanes.orders.weighted import WeightedOrder
from lanewise.lanes.placement import Placement, lane_ranges
from lanewise.lanes.schedule import LaneTurn, Schedule, SequentialSchedule
from lanewise.lanes.seed import (
    evaluation_seed,
    lane_seed,
    metric_seed,
    model_seed,
    read_seed,
    sample_seed,
    update_seed,
)
from lanewise.lanes.tree import Node, TreeSum

__all__ = [
    "BlockedOrder",
    "BucketedOrder",
    "FeistelShuffle",
    "LaneTurn",
    "Node",
    "OrderInputs",
    "Placement",
    "SampleOrder",
    "Schedule",
    "SequentialOrder",
    "SequentialSchedule",
    "ShuffledOrder",
    "TreeSum",
    "WeightedOrder",
    "evaluation_seed",
    "lane_ranges",
    "lane_seed",
    "metric_seed",
    "model_seed",
    "read_seed",
    "sample_seed",
    "update_seed",
]
