"""Modules for the user's models whose cost or result matters to how they are trained."""

from lanewise.nn.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
