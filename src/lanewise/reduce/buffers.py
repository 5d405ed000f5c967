"""What becomes of a model's buffers (BatchNorm's statistics) when several lanes change them in one step.

Each lane starts from the values at the start of the step. Afterwards a float buffer that lanes changed is the
mean of what they made of it, weighted by their sample counts and added in the tree; integer and boolean
buffers must agree. Buffers that no lane changes are left alone. So the statistics are a function of the
lanes, not of the processes, in both grades.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, TreeSum, lane_blocks, subtrees
from lanewise.reduce.pending import add_into_right
from lanewise.world.streams import start_copy_to_host
from lanewise.world.world import World

_LaneValues = list[tuple[LaneTurn, dict[str, torch.Tensor]]]
"""What each lane of this process made of the buffers, by name; of the others it made nothing."""


class _Buffer:
    """One buffer of one module, by name; it survives that the module replaces the tensor."""

    def __init__(self, name: str, module: nn.Module, key: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._module = module
        self._key = key
        self._tensor = tensor
        self.note_start()

    def note_start(self) -> None:
        """Take the present value for the one at the start of the step."""
        self.start = self.value()
        self.reset()

    def follow(self, other: "_Buffer") -> None:
        """Take the start of the step from the same buffer of another replica."""
        self.start = other.start.to(self._tensor.device)
        self.reset()

    def reset(self) -> None:
        """Put the value at the start of the step back."""
        self._module._buffers[self._key] = self._tensor
        self._tensor.copy_(self.start)
        self._version = self._tensor._version

    def has_changed(self) -> bool:
        """Compare with the start of the step; waits for the device."""
        return not torch.equal(self.value(), self.start)

    def was_written(self) -> bool:
        """Tell whether python code wrote it since `reset`, without waiting for the device.

        A kernel that updates it aside, as BatchNorm's does with its statistics, is not seen.
        """
        value = self._module._buffers[self._key]
        return value is not self._tensor or value._version != self._version

    def value(self) -> torch.Tensor:
        """Return a copy of what the module holds now: the next lane's forward overwrites it."""
        value = self._module._buffers[self._key]
        if value is None or value.shape != self._tensor.shape:
            raise TaskError(
                f"buffer {self.name} had the shape {tuple(self._tensor.shape)} at first and now "
                f"{'is None' if value is None else f'has {tuple(value.shape)}'}. Keep the shapes of buffers."
            )
        return value.detach().clone()


class LaneBuffers:
    """Gives every lane the same starting buffers and merges what the lanes made of them.

    For each lane of a step `begin` and, after its forward, `end`; then `merge` or `discard`. Which buffers
    change is found out in the first step, over all ranks; they travel in each step, in one all-gather.

    Args:
        modules: whatever runs in a lane's forward, for each replica; read when the first lane begins.
        world: the processes.
        num_lanes: lanes of the run.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]], world: World, num_lanes: int) -> None:
        self._modules = modules
        self._world = world
        self._num_lanes = num_lanes
        self._blocks = lane_blocks(num_lanes, world.world_size)
        self._is_first_step = True
        # Each buffer on each replica.
        self._changing: list[tuple[_Buffer, ...]] = []
        self._constant: list[tuple[_Buffer, ...]] = []
        self._lanes: _LaneValues = []
        self._check: Callable[[], None] = lambda: None

    def begin(self, place: int = 0) -> None:
        """Give a lane, on one of the replicas, the starting values."""
        if place == 0 and not self._lanes:
            self._begin_step()
        else:
            for buffers in self._changing:
                buffers[place].reset()

    def _begin_step(self) -> None:
        self.check()
        if self._is_first_step:
            self._changing = list(zip(*map(_find, self._modules), strict=True))
        # The user may have written those on the first replica between the steps.
        written = [buffers for buffers in self._constant if buffers[0].was_written()]
        for first, *others in (*self._changing, *written):
            first.note_start()
            for other in others:
                other.follow(first)

    def end(self, turn: LaneTurn, place: int = 0) -> None:
        """Note what a lane made of the buffers."""
        values = {
            buffers[0].name: buffers[place].value().to(buffers[0].start.device)
            for buffers in self._changing
            if not self._is_first_step or buffers[place].has_changed()
        }
        self._lanes.append((turn, values))

    def discard(self) -> None:
        """Forget what the lanes of the step made of the buffers."""
        self._lanes = []
        for buffers in (*self._changing, *self._constant):
            for buffer in buffers:
                buffer.reset()

    def merge(self) -> None:
        """Merge the buffers over all lanes of the step. Collective: every rank must call this.

        Raises:
            TaskError: if a buffer changes that didn't in the first step.
        """
        lanes, self._lanes = self._lanes, []
        if self._is_first_step:
            self._is_first_step = False
            changed = {name for _, values in lanes for name in values}
            everywhere = set().union(*self._world.all_gather_object(changed))
            self._constant = [buffers for buffers in self._changing if buffers[0].name not in everywhere]
            self._changing = [buffers for buffers in self._changing if buffers[0].name in everywhere]
        for buffers in self._constant:
            if any(buffer.was_written() and buffer.has_changed() for buffer in buffers):
                raise TaskError(
                    f"buffer {buffers[0].name} changed in step {lanes[0][0].step}, but not in the first one. "
                    "Update it in every step, or keep it out of the module's buffers."
                )
        if not self._changing:
            return
        integers: list[tuple[str, torch.Tensor]] = []
        firsts = [buffers[0] for buffers in self._changing]
        for buffer, mean in zip(firsts, self._mean(lanes, firsts), strict=True):
            if not buffer.start.is_floating_point():
                integers.append((buffer.name, mean))
            buffer.start = mean.to(buffer.start.dtype)
            buffer.reset()
        self._check = _start_comparison(integers, lanes)

    def check(self) -> None:
        """Look at what `merge` found; apart from it, so that a GPU need not be waited for at once.

        Raises:
            TaskError: if an integer buffer differed between lanes.
        """
        check, self._check = self._check, lambda: None
        check()

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


def _start_comparison(integers: list[tuple[str, torch.Tensor]], lanes: _LaneValues) -> Callable[[], None]:
    """Compare what the lanes of this process made of integer buffers with the means over all lanes.

    If no process finds a difference, all lanes agree: each equals the same mean.

    Returns:
        A function that waits for the comparison and raises TaskError where they differ.
    """
    claims = [
        (name, turn, values[name], mean)
        for name, mean in integers
        for turn, values in lanes
        if turn.positions and name in values
    ]
    if not claims:
        return lambda: None
    wait = start_copy_to_host(torch.stack([(value != mean).any() for _, _, value, mean in claims]))

    def check() -> None:
        for differs, (name, turn, value, mean) in zip(wait().tolist(), claims, strict=True):
            if differs:
                raise TaskError(
                    f"integer buffer {name} differs between the lanes of step {turn.step}: "
                    f"lane {turn.lane} made {value.tolist()} of it, the mean over all lanes is "
                    f"{mean.tolist()}. Make it a float buffer, or equal in all lanes."
                )

    return check


def _find(modules: Sequence[nn.Module]) -> Iterator[_Buffer]:
    """Find every buffer of the modules; of several, with the module's number in its name."""
    for number, root in enumerate(modules):
        for prefix, module in root.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    name = ".".join(part for part in (prefix, key) if part)
                    yield _Buffer(f"{number}:{name}" if len(modules) > 1 else name, module, key, tensor)
