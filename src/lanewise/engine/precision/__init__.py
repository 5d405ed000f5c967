"""The number formats in which a model computes.

A new one is a name in `PrecisionName` (`config/run.py`), what it does in `precision.py`, and the peak of
devices in it, by which a run knows their utilization, in `processes/device/peak.py`.
"""

from lanewise.engine.precision.loss_scale import LossScale as LossScale
from lanewise.engine.precision.precision import Precision as Precision
