"""Reads a checkpoint that verified."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lanewise.checkpoint.encode import decode
from lanewise.checkpoint.manifest import Manifest
from lanewise.checkpoint.saver import STATE
from lanewise.errors import CheckpointError


def load_state(folder: Path, manifest: Manifest) -> Any:
    """Return the state that was saved, with its tensors on the CPU.

    Args:
        folder: of the checkpoint.
        manifest: its manifest, which was verified.

    Raises:
        CheckpointError: if a file cannot be read after all.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        for entry in manifest.files:
            if entry.name != STATE:
                with safe_open(folder / entry.name, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        tensors[name] = file.get_tensor(name).clone()  # the file may go
        tree = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    return decode(tree, tensors)
