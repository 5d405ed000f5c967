"""Gathers the rows of tensors of which each process has some."""

from collections.abc import Sequence

import torch

from lanewise.processes.world.world import World


def gather_rows(
    own: Sequence[torch.Tensor], num_rows: Sequence[Sequence[int]], most_bytes: int, world: World
) -> list[torch.Tensor]:
    """Return each tensor with the rows of all processes, which travel as bytes of one tensor.

    Collective: every rank must call this.

    Args:
        own: the rows of this process, contiguous and on its device, equal in all but their number; none on a
            process that does not know what others have.
        num_rows: for each rank, how many rows each of these tensors has there.
        most_bytes: the most that a process sends.
        world: the processes.
    """
    sent = torch.zeros(max(1, most_bytes), dtype=torch.uint8, device=world.device)
    place = 0
    for tensor in own:
        flat = tensor.view(-1).view(torch.uint8)
        sent[place : place + len(flat)] = flat
        place += len(flat)
    gathered = world.start_all_gather(sent)()
    places = [0] * world.world_size
    joined: list[torch.Tensor] = []
    for number, tensor in enumerate(own):
        parts: list[torch.Tensor] = []
        for rank, of_rank in enumerate(num_rows):
            start = places[rank]
            places[rank] += of_rank[number] * row_bytes(tensor)
            parts.append(gathered[rank, start : places[rank]])
        # `cat` aligns the bytes, as a view of another type needs them.
        total = sum(of_rank[number] for of_rank in num_rows)
        joined.append(torch.cat(parts).view(tensor.dtype).view(total, *tensor.shape[1:]))
    return joined


def row_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a row of a tensor."""
    return tensor.shape[1:].numel() * tensor.element_size()
