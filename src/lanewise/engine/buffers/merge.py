"""Merges the values that the lanes of a step gave to packs of buffers."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from lanewise.engine.buffers.pack import Kind
from lanewise.lanes import Placement, Present, TreeSum
from lanewise.processes.device.accelerator import float64_device
from lanewise.processes.world.world import World
from lanewise.reduce.pending import add_into_right

_TreeSum: TypeAlias = TreeSum[list[torch.Tensor]]


def merge_buffers(
    world: World,
    placement: Placement,
    present: Present,
    lanes: Sequence[tuple[int, int]],
    values: Sequence[Mapping[int, torch.Tensor]],
    kinds: Mapping[int, Kind],
) -> dict[int, torch.Tensor]:
    """Return for each pack, as a flat tensor, the mean over all lanes of the step, weighted by samples.

    For a pack of integers, return the values of the first lane that has samples, since all samples of a
    lane may be left out. Sums are in float64.

    Collective: every rank must call this, with the same kinds.

    Args:
        world: the processes.
        placement: which process carries which lanes.
        present: the lanes that have samples in the step.
        lanes: the lanes of this process, each with its number of samples.
        values: for each of these lanes, the values of the packs after its forward.
        kinds: the kind of each pack that is merged, by the number of the pack.
    """
    floats = {
        number: size * (2 if dtype.is_complex else 1)
        for number, (size, dtype) in kinds.items()
        if is_averaged(dtype)
    }
    integers = {number: size for number, (size, _) in kinds.items() if number not in floats}
    device = float64_device(world.device)
    unit = torch.ones(1, dtype=torch.float64, device=device)
    tree_sum: _TreeSum = TreeSum(placement.num_lanes, present, add_into_right)
    first: dict[int, torch.Tensor] | None = None
    for (lane, num_samples), of_lane in zip(lanes, values, strict=True):
        row = torch.cat([*(_to_real(of_lane[number], device) for number in floats), unit])
        if not num_samples:  # a product with 0 would be NaN where a value is infinite
            row.zero_()
        elif len(present) > 1:  # a single lane keeps its exact values, as it does on a single process
            row.mul_(num_samples)
        tree_sum.push((lane, lane + 1), [row])
        if num_samples and first is None:
            first = {number: of_lane[number].flatten() for number in integers}
    if world.world_size > 1:
        tree_sum, first = _exchange(
            world, placement, present, tree_sum, sum(floats.values()) + 1, first, integers
        )
    assert first is not None, "a step without samples has no weight, and so nothing to merge"
    *sums, num_samples_of_all = tree_sum.root()[0].split([*floats.values(), 1])
    means = {
        number: _from_float64(total / num_samples_of_all, kinds[number][1])
        for number, total in zip(floats, sums, strict=True)
    }
    return {number: value.to(world.device, kinds[number][1]) for number, value in (means | first).items()}


def _exchange(
    world: World,
    placement: Placement,
    present: Present,
    local_sum: _TreeSum,
    size: int,
    local_integers: Mapping[int, torch.Tensor] | None,
    sizes_of_integers: Mapping[int, int],
) -> tuple[_TreeSum, dict[int, torch.Tensor]]:
    """Return the sum over all processes, and the integers of the first process that has any. Collective.

    Sums and integers travel in one tensor: the bits of the float64 sums are viewed as int64.
    """
    device = float64_device(world.device)
    nodes = placement.subtrees(present)
    sums = torch.zeros(max(map(len, nodes)), size, dtype=torch.float64, device=device)
    for index, (_, (subtree_sum,)) in enumerate(local_sum.pending):
        sums[index] = subtree_sum
    sizes = list(sizes_of_integers.values())
    integers = torch.zeros(1 + sum(sizes), dtype=torch.int64, device=device)
    if local_integers is not None:
        integers[0] = 1
        for view, value in zip(integers[1:].split(sizes), local_integers.values(), strict=True):
            view.copy_(value)
    gathered = world.start_all_gather(torch.cat([sums.flatten().view(torch.int64), integers]))()

    tree_sum: _TreeSum = TreeSum(placement.num_lanes, present, add_into_right)
    for rank_nodes, of_rank in zip(nodes, gathered, strict=True):
        rank_sums = of_rank[: sums.numel()].view(torch.float64).view(sums.shape)
        for node, subtree_sum in zip(rank_nodes, rank_sums, strict=False):
            tree_sum.push(node, [subtree_sum.clone()])
    of_ranks = gathered[:, sums.numel() :]
    first = of_ranks.index_select(0, of_ranks[:, :1].argmax(dim=0))[0]  # without waiting for a GPU
    parts = first[1:].split(sizes)
    return tree_sum, dict(zip(sizes_of_integers, parts, strict=True))


def is_averaged(dtype: torch.dtype) -> bool:
    """Tell whether buffers of a dtype are averaged; others must be equal in all lanes."""
    return dtype.is_floating_point or dtype.is_complex


def _to_real(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the values of a pack as flat float64, complex ones as two real numbers each."""
    value = value.to(device)  # moved before it is cast: its own device may have no float64
    if value.is_complex():
        value = torch.view_as_real(value.to(torch.complex128).resolve_conj())
    return value.double().flatten()


def _from_float64(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(flat.clone().view(-1, 2)) if dtype.is_complex else flat.to(dtype)
