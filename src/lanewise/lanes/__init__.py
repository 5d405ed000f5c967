"""Lanes as pure integers: who carries them, what they read, how their values are added, and their seeds."""

from lanewise.lanes.orders.blocked import BlockedOrder as BlockedOrder
from lanewise.lanes.orders.bucketed import BucketedOrder as BucketedOrder
from lanewise.lanes.orders.order import OrderInputs as OrderInputs
from lanewise.lanes.orders.order import SampleOrder as SampleOrder
from lanewise.lanes.orders.order import SequentialOrder as SequentialOrder
from lanewise.lanes.orders.order import ShuffledOrder as ShuffledOrder
from lanewise.lanes.orders.permutation import FeistelShuffle as FeistelShuffle
from lanewise.lanes.orders.weighted import WeightedOrder as WeightedOrder
from lanewise.lanes.placement import Placement as Placement
from lanewise.lanes.placement import lane_ranges as lane_ranges
from lanewise.lanes.schedule import LaneTurn as LaneTurn
from lanewise.lanes.schedule import Schedule as Schedule
from lanewise.lanes.schedule import SequentialSchedule as SequentialSchedule
from lanewise.lanes.seed import backward_seed as backward_seed
from lanewise.lanes.seed import batch_loss_seed as batch_loss_seed
from lanewise.lanes.seed import evaluation_seed as evaluation_seed
from lanewise.lanes.seed import lane_seed as lane_seed
from lanewise.lanes.seed import metric_seed as metric_seed
from lanewise.lanes.seed import model_seed as model_seed
from lanewise.lanes.seed import read_seed as read_seed
from lanewise.lanes.seed import sample_seed as sample_seed
from lanewise.lanes.seed import stream_seed as stream_seed
from lanewise.lanes.seed import update_seed as update_seed
from lanewise.lanes.tree import Node as Node
from lanewise.lanes.tree import Present as Present
from lanewise.lanes.tree import TreeSum as TreeSum
