"""Durable state of a run."""

from lanewise.checkpoint.model_file import save_model

__all__ = ["save_model"]
