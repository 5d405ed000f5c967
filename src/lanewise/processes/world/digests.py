"""Digests of the tensors of a state: they differ where a bit differs, and tell which process has it.

A digest has 16 hexadecimal digits. It depends on the elements in the order of their indices, on dtype and
shape; not on strides, devices, or how a tensor is shared out among processes: their parts join by xor.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import xor
from typing import Any

import torch

from lanewise.errors import CheckpointError, WorldError
from lanewise.processes.device.tensor_bytes import checksums, placed_checksum
from lanewise.processes.world.shards import HeldTensor, is_sharded, row_ranges
from lanewise.processes.world.world import World

_NONE = "none"
"""Stands for the digest of a tensor that a process lacks."""


def gather_digests(state: Mapping[str, Any], world: World, step: int) -> dict[str, str]:
    """Return the digest of every tensor of a state, and compare those that each process has whole.

    Collective: every rank must call this.

    Args:
        state: nested mappings, lists and tuples; tensors may be sharded or held.
        world: the processes.
        step: the number of steps that were taken.

    Raises:
        WorldError: on every rank, if a tensor differs between processes that should have it alike.
    """
    named = dict(named_tensors(state))
    shared_out = {name for name, value in named.items() if isinstance(value, HeldTensor) or is_sharded(value)}
    own = _digests(named, without_form=shared_out if world.rank else ())
    gathered = world.all_gather_tree(own)
    digests: dict[str, str] = {}
    for name in dict.fromkeys(name for theirs in gathered for name in theirs):
        values = [theirs.get(name, _NONE) for theirs in gathered]
        if name in shared_out and _NONE not in values:
            digests[name] = f"{reduce(xor, (int(value, 16) for value in values)):016x}"
        elif len(set(values)) == 1:
            digests[name] = values[0]
        else:
            hosts = world.all_gather_tree(f"{socket.gethostname()}, {world.device}")
            raise WorldError(_describe(name, values, hosts, step))
    return digests


def require_digests(state: Mapping[str, Any], digests: Mapping[str, str], what: object) -> None:
    """Compare a state, whose tensors are whole, with what `gather_digests` returned of it.

    Raises:
        CheckpointError: if a tensor is not as it was, or is not there.
    """
    found = digests_of(state)
    for name, digest in digests.items():
        if found.get(name) != digest:
            raise CheckpointError(
                f"{what} is damaged: {name} has the digest {found.get(name, _NONE)}, and had {digest} on the "
                "devices that saved it. The files are as they were written: memory was wrong, then or now. "
                "Try another host, or remove this checkpoint to go on from the one before."
            )


def digests_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every tensor of a state on this process, where all are whole."""
    return _digests(dict(named_tensors(state)))


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and held tensors in nested containers, by their keys."""
    if isinstance(value, torch.Tensor | HeldTensor):
        yield path, value
    is_list = isinstance(value, list | tuple)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if is_list else ()
    for key, item in items:
        yield from named_tensors(item, f"{path}/{key}" if path else str(key))


def _digests(named: Mapping[str, Any], without_form: Any = ()) -> dict[str, str]:
    """Return the digests of what this process has of each tensor.

    Args:
        named: the tensors.
        without_form: those whose dtype and shape another process adds.
    """
    parts = checksums(map(_own_part, named.values()), lambda part: placed_checksum(*part))
    return {
        name: f"{(part ^ (0 if name in without_form else _form(value))) % 2**64:016x}"
        for (name, value), part in zip(named.items(), parts, strict=True)
    }


def _own_part(value: Any) -> tuple[torch.Tensor, int]:
    """Return what this process has of a tensor, and how many elements of the whole one are before it."""
    if isinstance(value, HeldTensor):
        tensor = value.tensor
        return tensor.new_empty(0, device="cpu") if tensor.is_meta else tensor, 0
    if not is_sharded(value):
        return value, 0
    rows = row_ranges(value)[value.device_mesh.get_local_rank()]
    return value.to_local(), rows.start * (value.numel() // max(1, len(value)))


def _form(value: Any) -> int:
    """Return a number that stands for dtype and shape."""
    tensor = value.tensor if isinstance(value, HeldTensor) else value
    return int(hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode()).hexdigest()[:16], 16)


def _describe(name: str, values: Sequence[str], hosts: Sequence[str], step: int) -> str:
    """Say which processes have another tensor than most; where no value is that of most, what each has."""
    ((common, count),) = Counter(values).most_common(1)
    has_most = 2 * count > len(values)
    shown = [
        f"rank {rank} ({hosts[rank]}) has the digest {value}"
        for rank, value in enumerate(values)
        if not (has_most and value == common)
    ]
    others = (
        f"the other {count} have {common}"
        if has_most
        else "no digest has a majority, so any of them may be wrong"
    )
    return (
        f"{name} differs between processes after step {step}, where all must have the same: "
        f"{'; '.join(shown)}; {others}. A device or its memory was wrong, or code changed it on one process "
        "alone (docs/failure.md). It was not saved: continue from the checkpoint before with --resume. If "
        "it comes again, use other devices, and look for a fault of those named here, or of their drivers."
    )
