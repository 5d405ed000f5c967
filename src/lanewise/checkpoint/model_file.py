"""Writes a model's weights to a safetensors file, whole or not at all."""

import json
import logging
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

logger = logging.getLogger(__name__)


def save_model(model: nn.Module, path: Path) -> None:
    """Write parameters and buffers under the plain module's names.

    A tied tensor is written once, under its first name; the metadata's `aliases` is a JSON object of the
    other names. Extra state that is no tensor has no place in the file, and a warning names it. The file
    appears under its name only when it is complete and on disk.

    Args:
        model: the user's module.
        path: the file to make or replace.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[tuple[object, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            logger.warning("%s is not in %s: it is no tensor", name, path.name)
            continue
        # Two names are tied where they show the same elements of one storage.
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = first_names.setdefault(view, name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)  # shares no storage
        else:
            aliases[name] = first
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(tensors, temporary, metadata={"aliases": json.dumps(aliases)} if aliases else None)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
