"""Pins the environment before any test imports torch, as the command line does."""

from lanewise.config import pin_environment

pin_environment(threads=1, equality="exact")
