"""The number formats in which a model computes."""

from lanewise.precision.loss_scale import LossScale
from lanewise.precision.precision import Precision

__all__ = ["LossScale", "Precision"]
