"""Measures the user's own task in every mode, in turns, and says what bounds it."""

MODULES = ("lanewise.commands.bench.job", "torchmetrics")
"""What the processes of a mode import besides the engine."""
