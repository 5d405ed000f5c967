"""In which number formats a model computes."""

from lanewise.precision.precision import Precision

__all__ = ["Precision"]
