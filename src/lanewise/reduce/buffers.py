"""What becomes of a model's buffers (BatchNorm's statistics) when several lanes change them in one step.

Each lane starts from the values at the start of the step. Afterwards a float buffer that lanes changed is the
mean of what they made of it, weighted by their sample counts and added in the tree; integer and boolean
buffers must agree. Buffers that no lane changes are left alone. So the statistics are a function of the
lanes, not of the processes, in both grades.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, TreeSum, lane_blocks, subtrees
from lanewise.reduce.pending import add_into_right
from lanewise.world.world import World

_LaneValues = list[tuple[LaneTurn, dict[str, torch.Tensor]]]
"""What each lane of this process made of the buffers, by name; of the others it made nothing."""


@dataclass
class _Buffer:
    """One buffer of one module, by name; it survives that the module replaces the tensor."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    start: torch.Tensor
    """Its value at the start of the step."""
    version: int = 0

    def reset(self) -> None:
        """Put the value at the start of the step back."""
        self.module._buffers[self.key] = self.tensor
        self.tensor.copy_(self.start)
        self.version = self.tensor._version

    def has_changed(self) -> bool:
        """Compare with the start of the step; waits for the device."""
        return not torch.equal(self.value(), self.start)

    def was_written(self) -> bool:
        """Tell whether python code wrote it since `reset`, without waiting for the device.

        A kernel that updates it aside, as BatchNorm's does with its statistics, is not seen.
        """
        value = self.module._buffers[self.key]
        return value is not self.tensor or value._version != self.version

    def value(self) -> torch.Tensor:
        """Return a copy of what the module holds now: the next lane's forward overwrites it."""
        value = self.module._buffers[self.key]
        assert value is not None
        return value.detach().clone()


class LaneBuffers:
    """Gives every lane the same starting buffers and merges what the lanes made of them.

    Which buffers change is found out in the first step, over all ranks; they travel in each step, in one
    all-gather.

    Args:
        model: the user's module.
        world: the processes.
        num_lanes: lanes of the run.
    """

    def __init__(self, model: nn.Module, world: World, num_lanes: int) -> None:
        self._world = world
        self._num_lanes = num_lanes
        self._blocks = lane_blocks(num_lanes, world.world_size)
        self._buffers = [
            _Buffer(f"{prefix}.{key}".lstrip("."), module, key, tensor, tensor.clone(), tensor._version)
            for prefix, module in model.named_modules()
            for key, tensor in module._buffers.items()
            if tensor is not None
        ]
        self._tracked: list[_Buffer] | None = None
        self._constant: list[_Buffer] = []
        self._lanes: _LaneValues = []

    @contextmanager
    def lane(self, turn: LaneTurn) -> Iterator[None]:
        """Run a lane's forward from the starting values, and note what it makes of them."""
        is_first = self._tracked is None
        buffers = self._buffers if self._tracked is None else self._tracked
        for buffer in buffers:
            buffer.reset()
        yield
        values = {buffer.name: buffer.value() for buffer in buffers if not is_first or buffer.has_changed()}
        self._lanes.append((turn, values))

    def discard(self) -> None:
        """Forget what the lanes of the step made of the buffers."""
        self._lanes = []
        for buffer in self._buffers:
            buffer.reset()

    def finish(self) -> None:
        """Merge the buffers over all lanes of the step. Collective: every rank must call this.

        Raises:
            TaskError: if an integer buffer differs between lanes, or a buffer changes that didn't in the
            first step.
        """
        lanes, self._lanes = self._lanes, []
        if self._tracked is None:
            changed = {name for _, values in lanes for name in values}
            everywhere = set().union(*self._world.all_gather_object(changed))
            self._tracked = [buffer for buffer in self._buffers if buffer.name in everywhere]
            self._constant = [buffer for buffer in self._buffers if buffer.name not in everywhere]
        for buffer in self._constant:
            if buffer.was_written() and buffer.has_changed():
                raise TaskError(
                    f"buffer {buffer.name} changed in step {lanes[0][0].step}, but not in the first step. "
                    "Update it in every step, or keep it out of the module's buffers."
                )
        if not self._tracked:
            return
        for buffer, mean in zip(self._tracked, self._mean(lanes, self._tracked), strict=True):
            if not buffer.start.is_floating_point():
                _require_agreement(buffer, mean, lanes)
            buffer.start = mean.to(buffer.start.dtype)
            buffer.reset()

    def _mean(self, lanes: _LaneValues, buffers: list[_Buffer]) -> list[torch.Tensor]:
        """Return each buffer's mean over the lanes of all ranks, in float64, weighted by samples."""
        present = lanes[0][0].num_present_lanes
        one = torch.ones(1, dtype=torch.float64, device=buffers[0].start.device)
        sizes = [buffer.start.numel() for buffer in buffers]
        own_sum: TreeSum[list[torch.Tensor]] = TreeSum(self._num_lanes, present, add_into_right)
        for turn, values in lanes:
            if turn.positions:
                lane_values = [values.get(buffer.name, buffer.start).double().flatten() for buffer in buffers]
                own_sum.push(
                    (turn.lane, turn.lane + 1), [torch.cat([*lane_values, one]) * len(turn.positions)]
                )

        nodes = [subtrees(block, self._num_lanes, present) for block in self._blocks]
        sums = one.new_zeros(max(map(len, nodes)), sum(sizes) + 1)
        for index, (_, (subtree_sum,)) in enumerate(own_sum.pending):
            sums[index] = subtree_sum
        gathered = self._world.start_all_gather(sums)()

        tree_sum: TreeSum[list[torch.Tensor]] = TreeSum(self._num_lanes, present, add_into_right)
        for rank_nodes, rank_sums in zip(nodes, gathered, strict=True):
            for node, subtree_sum in zip(rank_nodes, rank_sums, strict=False):
                tree_sum.push(node, [subtree_sum])
        *totals, num_samples = tree_sum.root()[0].split([*sizes, 1])
        return [
            (total / num_samples).view(buffer.start.shape)
            for total, buffer in zip(totals, buffers, strict=True)
        ]


def _require_agreement(buffer: _Buffer, mean: torch.Tensor, lanes: _LaneValues) -> None:
    """Raise where a lane of this process made something else of an integer buffer than the mean.

    If no process raises, all lanes agree: each equals the same mean.
    """
    for turn, values in lanes:
        value = values.get(buffer.name, buffer.start)
        if turn.positions and not torch.equal(value.double(), mean):
            raise TaskError(
                f"integer buffer {buffer.name} differs between the lanes of step {turn.step}: "
                f"lane {turn.lane} made {value.tolist()} of it, the mean over all lanes is {mean.tolist()}. "
                "Make it a float buffer, or equal in all lanes."
            )
