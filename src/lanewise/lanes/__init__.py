"""Lanes as pure integers: who carries them, what they read, how their sums meet, which seeds they use."""

from lanewise.lanes.feistel import FeistelOrder
from lanewise.lanes.layout import lane_ranges
from lanewise.lanes.order import SampleOrder, SequentialOrder, choose_order
from lanewise.lanes.schedule import LaneTurn, Schedule, SequentialSchedule
from lanewise.lanes.seed import (
    collate_seed,
    evaluation_seed,
    lane_seed,
    model_seed,
    sample_seed,
    update_seed,
)
from lanewise.lanes.tree import Node, TreeSum, subtrees

__all__ = [
    "FeistelOrder",
    "LaneTurn",
    "Node",
    "SampleOrder",
    "Schedule",
    "SequentialOrder",
    "SequentialSchedule",
    "TreeSum",
    "choose_order",
    "collate_seed",
    "evaluation_seed",
    "lane_ranges",
    "lane_seed",
    "model_seed",
    "sample_seed",
    "subtrees",
    "update_seed",
]
