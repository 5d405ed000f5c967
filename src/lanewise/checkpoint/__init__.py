"""Durable state of a run."""

from lanewise.checkpoint.model_file import load_model, save_model

__all__ = ["load_model", "save_model"]
