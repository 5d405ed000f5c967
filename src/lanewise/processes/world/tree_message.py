"""Sends trees of tensors, numbers and text to other processes; what arrives cannot run code.

[Note: messages]
torch's own collectives for objects unpickle what arrives, so whoever reaches a port of a run could run code
in it. Here each process first says how long its message is; then all send as many bytes as the longest has:

    lengths    int64    of the header, and of the whole message
    header     JSON     [tree, [[name, dtype, shape, is_meta], ...]]     the tree as `encode` makes it
    tensors    bytes    in the order of the header, each from a multiple of 8 bytes on; none of a meta tensor

Nothing more is allocated than the lengths say, and every length, name, dtype and shape is checked.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from lanewise.errors import WorldError
from lanewise.processes.world.encode import DTYPES, TensorTable, decode, encode

# torch 2.13 renamed the collective; the old name warns there, the new one does not exist before.
all_gather_single: Callable[..., dist.Work | None] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_ALIGNMENT = 8


def all_gather_tree(value: Any, device: torch.device) -> list[Any]:
    """Return every rank's value, in rank order. Collective: every rank must call this.

    Args:
        value: what `encode` takes; tensors on the meta device have no values to send.
        device: of the tensors that torch's backend sends. What arrives is in host memory.

    Raises:
        WorldError: if a value cannot be sent, or what arrives is no message.
    """
    lengths, buffer = _exchange_lengths(value, device)
    received = _allocate((len(lengths), len(buffer)), device)
    all_gather_single(received.view(-1), buffer)
    return _read_all(received, lengths)


def gather_tree(value: Any, device: torch.device) -> list[Any] | None:
    """Return every rank's value on rank 0, None elsewhere. Collective: see `all_gather_tree`."""
    lengths, buffer = _exchange_lengths(value, device)
    if dist.get_rank():
        dist.gather(buffer)
        return None
    received = _allocate((len(lengths), len(buffer)), device)
    dist.gather(buffer, list(received))
    return _read_all(received, lengths)


def dump_tree(value: Any) -> bytes:
    """Write a value for `load_tree`.

    Args:
        value: what `encode` takes.

    Raises:
        WorldError: if it is something else.
    """
    message = _Message(value)
    header, whole = message.lengths
    written = message.write(whole, torch.device("cpu")).numpy().tobytes()
    return header.to_bytes(_ALIGNMENT, "big") + written


def load_tree(written: bytes) -> Any:
    """Return a value that `dump_tree` wrote, perhaps on another host.

    Raises:
        WorldError: if something else wrote it.
    """
    header, rest = int.from_bytes(written[:_ALIGNMENT], "big"), written[_ALIGNMENT:]
    lengths = _check([(header, len(rest))])
    return _read_all(torch.frombuffer(bytearray(rest), dtype=torch.uint8).unsqueeze(0), lengths)[0]


@final
class _Message:
    """A value, ready to be sent. See [Note: messages]."""

    def __init__(self, value: Any) -> None:
        table = TensorTable(WorldError, "sent to other processes")
        tree = encode(value, "the value", table)
        for name in sorted(table.held):
            raise table.refusal(name, "spread over processes")
        listed = [
            (name, DTYPES[tensor.dtype], list(tensor.shape), tensor.is_meta) for name, tensor in table.items()
        ]
        self._header = json.dumps([tree, listed], allow_nan=False).encode()
        self._tensors: list[tuple[slice, torch.Tensor]] = []
        stop = _align(len(self._header))
        for tensor in table.values():
            if not tensor.is_meta:
                self._tensors.append((slice(stop, stop + tensor.nbytes), tensor))
                stop = _align(stop + tensor.nbytes)
        self.lengths = len(self._header), stop

    def write(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return the bytes on a device, and as many more as are missing to `num_bytes`."""
        buffer = _allocate((num_bytes,), torch.device("cpu"))
        buffer[: len(self._header)] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        for place, tensor in self._tensors:
            buffer[place].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return buffer.to(device)


def _exchange_lengths(value: Any, device: torch.device) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Return the lengths of all ranks' messages, and this one's, as long as the longest. Collective."""
    message = _Message(value)
    told = torch.tensor(message.lengths, device=device)
    received = told.new_empty((dist.get_world_size(), 2))
    all_gather_single(received.view(-1), told)
    lengths = _check(received.tolist())
    return lengths, message.write(max(whole for _, whole in lengths), device)


def _check(lengths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    for rank, (header, whole) in enumerate(lengths):
        if not 0 < header <= whole:
            raise _not_a_message(rank, f"its lengths are {header} and {whole}")
    return [(header, whole) for header, whole in lengths]


def _allocate(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise WorldError(f"there is no memory for messages of {max(shape):,} bytes: {error!s:.99}") from error


def _read_all(received: torch.Tensor, lengths: Sequence[tuple[int, int]]) -> list[Any]:
    values = []
    for rank, (buffer, (header, whole)) in enumerate(zip(received.cpu(), lengths, strict=True)):
        try:
            values.append(_read(buffer[:whole], header))
        except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
            raise _not_a_message(rank, str(error)) from error
    return values


def _read(buffer: torch.Tensor, num_header_bytes: int) -> Any:
    """Return the value of a message, which may be anybody's; raise any of several errors if it is none."""
    tree, listed = json.loads(buffer[:num_header_bytes].numpy().tobytes().decode("ascii"))
    tensors = dict(_read_tensors(buffer, _align(num_header_bytes), listed))
    if len(tensors) < len(listed):
        raise ValueError("a tensor occurs twice")
    return decode(tree, tensors)


def _read_tensors(buffer: torch.Tensor, start: int, listed: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, is_meta in listed:
        dtype = _DTYPE_OF[dtype_name]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"a tensor has the shape {shape!r:.80}")
        if is_meta:
            yield name, torch.empty(shape, dtype=dtype, device="meta")
            continue
        stop = start + math.prod(shape) * dtype.itemsize
        if stop > len(buffer):
            raise ValueError("a tensor goes beyond its end")
        # A copy: aligned as any tensor, and without the rest of the message.
        yield name, buffer[start:stop].clone().view(dtype).view(shape)
        start = _align(stop)
    if start != len(buffer):
        raise ValueError(f"{len(buffer) - start} bytes are left over")


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _not_a_message(rank: int, why: str) -> WorldError:
    return WorldError(
        f"what came from rank {rank} is no message of this version of lanewise: {why:.200}. "
        "All processes need the same versions, and nobody else may reach their ports."
    )
