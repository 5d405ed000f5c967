"""Durable state of a run."""

from lanewise.checkpoint.folder import CheckpointFolder as CheckpointFolder
from lanewise.checkpoint.folder import read_good as read_good
from lanewise.checkpoint.manifest import Manifest as Manifest
from lanewise.checkpoint.model_file import grow_buffers as grow_buffers
from lanewise.checkpoint.model_file import grown_buffers as grown_buffers
from lanewise.checkpoint.model_file import load_model as load_model
from lanewise.checkpoint.model_file import save_model as save_model
from lanewise.checkpoint.model_file import save_tensors as save_tensors
from lanewise.checkpoint.saver import Saver as Saver
from lanewise.checkpoint.saver import load_state as load_state
