"""The part of a checkpoint that one process writes: which tensors, staged where, in which file.

The file is of the safetensors format (https://github.com/huggingface/safetensors#format): the length of a
JSON header, the header, the tensors one after the other. The library itself would gather the whole file in
memory first; here it is written from the staging buffer.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from lanewise.checkpoint.encode import DTYPES
from lanewise.checkpoint.manifest import FileEntry, write_durably
from lanewise.device.accelerator import has_streams


def share_out(num_bytes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Say which part each tensor is in: a pure function, so that nobody needs to ask.

    The largest first, each to the part that has least so far.
    """
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for name in sorted(num_bytes, key=lambda name: (-num_bytes[name], name)):
        part = loads.index(min(loads))
        parts[part].append(name)
        loads[part] += num_bytes[name]
    return parts


def part_name(rank: int) -> str:
    """Name the file of a process."""
    return f"part-{rank:05d}.safetensors"


class Staging:
    """Memory for one part, allocated and touched once; page-locked where a device copies to it by itself."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._header = b""

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of a `TensorTable` here; returns when they may be changed again."""
        # The format wants no gaps: aligned if the tensors with the longest elements come first.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self._require(sum(tensor.nbytes for tensor in tensors.values()), tensors.values())
        header: dict[str, object] = {}
        start = 0
        for name in names:
            tensor = tensors[name].detach()
            stop = start + tensor.nbytes
            staged = self._buffer[start:stop].view(tensor.dtype).view(tensor.shape)
            staged.copy_(tensor, non_blocking=self._buffer.is_pinned())
            shape = list(tensor.shape)
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
            start = stop
        if self._buffer.is_pinned():
            torch.accelerator.synchronize()
        self._num_bytes = start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text

    def write(self, path: Path) -> FileEntry:
        """Write what was taken last, and wait until it is on disk."""
        return write_durably(path, self._header, self._buffer.numpy().data[: self._num_bytes])

    def _require(self, num_bytes: int, tensors: Iterable[torch.Tensor]) -> None:
        if len(self._buffer) >= num_bytes:
            return
        is_pinned = any(has_streams(tensor.device) for tensor in tensors)
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._buffer.zero_()  # the first touch of a page costs more than the copy
