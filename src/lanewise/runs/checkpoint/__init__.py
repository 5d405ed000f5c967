"""Durable state of a run; to list the checkpoints of a run needs no torch."""
