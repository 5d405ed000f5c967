"""The number formats in which a model computes."""

from lanewise.engine.precision.loss_scale import LossScale as LossScale
from lanewise.engine.precision.precision import Precision as Precision
