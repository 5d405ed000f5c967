"""Reads the state of a verified checkpoint."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lanewise.checkpoint.encode import decode
from lanewise.checkpoint.manifest import Manifest, read_json
from lanewise.checkpoint.saver import MAX_STATE_BYTES, STATE
from lanewise.run_file import reading


def load_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the state that was saved, with its tensors on the CPU.

    Args:
        folder: of the checkpoint.
        manifest: its manifest, which was verified.

    Raises:
        CheckpointError: if a file cannot be read after all, or holds something that no save writes.
    """
    with reading(folder):
        tensors: dict[str, torch.Tensor] = {}
        for entry in manifest.files:
            if entry.name == STATE:
                continue
            with safe_open(folder / entry.name, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in tensors:
                        raise ValueError(f"{entry.name} holds a tensor that another file holds too")
                    tensors[name] = file.get_tensor(name).clone()  # the file may be removed
        state = decode(read_json(folder / STATE, MAX_STATE_BYTES), tensors)
        if not isinstance(state, dict):
            raise TypeError(f"{STATE} is not a mapping")
        return state
