"""Lanes as pure integers: who carries them, what they read, how their sums meet, which seeds they use."""

from lanewise.lanes.layout import lane_blocks
from lanewise.lanes.order import Order
from lanewise.lanes.schedule import BlockSchedule, LaneTurn, Schedule
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
    "BlockSchedule",
    "LaneTurn",
    "Node",
    "Order",
    "Schedule",
    "TreeSum",
    "collate_seed",
    "evaluation_seed",
    "lane_blocks",
    "lane_seed",
    "model_seed",
    "sample_seed",
    "subtrees",
    "update_seed",
]
