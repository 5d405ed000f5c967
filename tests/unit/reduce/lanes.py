"""Runs a reducer on lanes with given gradients: the gradient of sum(parameter * value) is value."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from lanewise.config import CompressionName, DistributedConfig
from lanewise.lanes import LaneTurn, Placement, Present, lane_ranges
from lanewise.processes.world.world import World
from lanewise.reduce import build_reducer

LaneValue = Callable[[int, int], torch.Tensor | None]
"""From (lane, size) to the gradient of a parameter of that size; None where the lane does not use it."""


def reduce_lanes(
    world: World,
    value: LaneValue,
    sizes: Sequence[int],
    *,
    equality: str,
    num_lanes: int,
    present: Present | None = None,
    steps: int = 3,
    compression: CompressionName | None = None,
) -> list[torch.Tensor]:
    """Return the gradients after the last of some equal steps: DDP rebuilds its buckets after the first."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes]).to(world.device)
    parameters = list(model)
    config = DistributedConfig(equality=equality, compression=compression)
    reducer = build_reducer(model, Placement.of(num_lanes, world), world, config)
    lanes = lane_ranges(num_lanes, world.world_size)[world.rank]
    for turn in _turns(lanes, range(num_lanes) if present is None else present, steps):

        def compute_loss(lane: int = turn.lane) -> torch.Tensor | None:
            products = [
                (parameter * gradient).sum()
                for parameter in parameters
                if (gradient := value(lane, parameter.numel())) is not None
            ]
            return torch.stack(products).sum() if products else None

        reducer.backward(turn, compute_loss() if turn.positions else None, None)
        if turn.is_last:
            reducer.finish(1.0)
            gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
            model.zero_grad()
    reducer.close()
    return gradients


def _turns(lanes: range, present: Present, steps: int) -> Iterator[LaneTurn]:
    """Yield the turns of equal steps."""
    own = [lane for lane in lanes if lane in present]
    for step in range(steps):
        for lane in own or lanes[:1]:
            positions = range(1) if own else range(0)
            yield LaneTurn(0, step, lane, positions, present, is_last=lane == [lanes[0], *own][-1])


def cancelling(lane: int, size: int) -> torch.Tensor:
    """1e8, 1, -1e8 and the like in another arrangement for each element: the order of the sum decides."""
    generator = torch.Generator().manual_seed(lane * 1000 + size)
    choices = torch.tensor([1e8, 1.0, -1e8, -3.0, 1e-3, 7.0, 3e7, -3e7])
    return choices[torch.randint(len(choices), (size,), generator=generator)]


def in_tree(value: LaneValue, sizes: Sequence[int], num_lanes: int, present: Present) -> list[torch.Tensor]:
    """Add in the tree by its definition: halves, the first one the larger, absent lanes left out."""

    def node(size: int, start: int, stop: int) -> torch.Tensor:
        middle = start + (stop - start + 1) // 2
        if stop - start == 1:
            leaf = value(start, size)
            return torch.zeros(size) if leaf is None else leaf
        if not any(lane in present for lane in range(middle, stop)):
            return node(size, start, middle)
        if not any(lane in present for lane in range(start, middle)):
            return node(size, middle, stop)
        return node(size, start, middle) + node(size, middle, stop)

    return [node(size, 0, num_lanes) for size in sizes]
