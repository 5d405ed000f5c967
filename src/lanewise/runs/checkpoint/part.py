"""The part of a checkpoint that one process writes: which tensors it holds, and where they are staged.

Its file is of the safetensors format (https://github.com/huggingface/safetensors#format): the length of a
JSON header, the header, the tensors one after the other. The library itself would gather the whole file in
memory first; here it is written from the staging buffer.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch

from lanewise.processes.device.accelerator import has_streams
from lanewise.processes.world.encode import DTYPES
from lanewise.runs.checkpoint.manifest import FileEntry, write_durably


def share_out(num_bytes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Return the tensors of each part: a pure function, so that processes need not ask each other.

    The largest tensor goes first, each to the part that has the fewest bytes so far.
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


def file_header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, slice]]:
    """Return the header of a file, and the bytes that each tensor takes after it, in the order of the file.

    The format allows no gaps: tensors are aligned if those with the longest elements come first.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    places: dict[str, slice] = {}
    start = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor, stop = tensors[name], start + tensors[name].nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
        places[name] = slice(start, stop)
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()  # as the library writes it
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


@final
class Staging:
    """Memory for one part, allocated and touched once; page-locked if a device can copy to it by itself."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._header = b""

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of a `TensorTable` here; returns when they may be changed again."""
        self._header, places = file_header(tensors)
        self._num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if len(self._buffer) < self._num_bytes:
            is_pinned = any(has_streams(tensor.device) for tensor in tensors.values())
            self._buffer = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            self._buffer.zero_()  # the first touch of a page costs more than the copy
        for name, place in places.items():
            tensor = tensors[name].detach()
            staged = self._buffer[place].view(tensor.dtype).view(tensor.shape)
            staged.copy_(tensor, non_blocking=self._buffer.is_pinned())
        if self._buffer.is_pinned():
            torch.accelerator.synchronize()

    def write(self, path: Path) -> FileEntry:
        """Write the tensors that were taken last, and wait until they are on disk."""
        return write_durably(path, self._header, self._buffer.numpy().data[: self._num_bytes])
