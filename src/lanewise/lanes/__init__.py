"""Lanes as pure integers: who carries them, what they read, how their sums meet, which seeds they use."""

from lanewise.lanes.feistel import FeistelOrder
from lanewise.lanes.layout import lane_blocks
from lanewise.lanes.order import SampleOrder, SequentialOrder, choose_order
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
    "FeistelOrder",
    "LaneTurn",
    "Node",
    "SampleOrder",
    "Schedule",
    "SequentialOrder",
    "TreeSum",
    "choose_order",
    "collate_seed",
    "evaluation_seed",
    "lane_blocks",
    "lane_seed",
    "model_seed",
    "sample_seed",
    "subtrees",
    "update_seed",
]
