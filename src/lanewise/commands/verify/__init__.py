"""Proves on the user's own model and data that N devices compute what one computes, or says why not."""

MODULES = ("lanewise.commands.verify.job", "torchmetrics")
"""What the processes of a layout import besides the engine."""
