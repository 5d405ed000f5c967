"""Reads a checkpoint that verified."""

from contextlib import ExitStack
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

    Only what the state names is read, each tensor once.

    Args:
        folder: of the checkpoint.
        manifest: its manifest, which was verified.

    Raises:
        CheckpointError: if a file cannot be read after all, or holds what no save writes.
    """
    with reading(folder), ExitStack() as stack:
        tensors = _StoredTensors(folder, manifest, stack)
        state = decode(read_json(folder / STATE, MAX_STATE_BYTES), tensors)
        if not isinstance(state, dict):
            raise TypeError(f"{STATE} is not a mapping")
        if unused := tensors.unread():
            raise ValueError(f"the state does not refer to the tensor {unused[0]:.80}")
        return state


class _StoredTensors(dict[str, torch.Tensor]):
    """The tensors of a checkpoint's files, each read when it is asked for first."""

    def __init__(self, folder: Path, manifest: Manifest, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for entry in manifest.files:
            if entry.name != STATE:
                file = stack.enter_context(safe_open(folder / entry.name, framework="pt"))
                names = file.keys()
                if self._files.keys() & names:
                    raise ValueError(f"{entry.name} holds a tensor that another file holds too")
                self._files |= dict.fromkeys(names, file)

    def __missing__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name).clone()  # the file may go
        return self.setdefault(name, tensor)

    def unread(self) -> list[str]:
        """Return the names of tensors that nobody asked for."""
        return sorted(self._files.keys() - self.keys())
