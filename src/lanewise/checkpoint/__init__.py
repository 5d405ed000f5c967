"""Durable state of a run."""

from lanewise.checkpoint.folder import CheckpointFolder, read_good
from lanewise.checkpoint.growth import grow_buffers, grown_buffers
from lanewise.checkpoint.load import load_state
from lanewise.checkpoint.manifest import Manifest
from lanewise.checkpoint.model_file import load_model, save_model, save_tensors
from lanewise.checkpoint.saver import Saver

__all__ = [
    "CheckpointFolder",
    "Manifest",
    "Saver",
    "grow_buffers",
    "grown_buffers",
    "load_model",
    "load_state",
    "read_good",
    "save_model",
    "save_tensors",
]
