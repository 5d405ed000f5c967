"""Rows of tensors of several types, of which each process has another number."""

import torch

from lanewise.engine.step.rows import gather_rows
from lanewise.processes.world.world import LocalWorld


class Three(LocalWorld):
    """Gives each rank the bytes that all have sent, when the last one asks."""

    world_size = 3

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.sent = []

    def start_all_gather(self, tensor):
        self.sent.append(tensor)
        return lambda: torch.stack([*self.sent, *[tensor] * (3 - len(self.sent))])


def test_tensors_of_several_types_and_no_rows_travel_as_bytes():
    world, num_rows = Three(), [[1, 3], [0, 0], [2, 1]]
    of_ranks = [
        [torch.arange(1.0 * a * 5).view(a, 5).bfloat16() + rank, torch.full((b, 1), rank > 0)]
        for rank, (a, b) in enumerate(num_rows)
    ]
    for own in of_ranks:
        joined = gather_rows(own, num_rows, 23, world)
    for tensor, *parts in zip(joined, *of_ranks, strict=True):
        assert torch.equal(tensor, torch.cat(parts))
