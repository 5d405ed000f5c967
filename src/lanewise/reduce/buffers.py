"""What becomes of a model's buffers (BatchNorm's statistics) when several lanes change them in one step.

Each lane starts from the values at the start of the step. Afterwards a float buffer that some lane changed is
the mean of what the lanes made of it, weighted by their sample counts and added in the tree; an integer or
boolean buffer must be equal in all lanes. So buffers are a function of the lanes, not of the processes, in
both grades.

Whether a lane changed a buffer is seen by its value, in every step: batch_norm's kernel writes its statistics
without a new version, and a buffer may change in some steps only. What a lane's forward made of a buffer
counts. What its backward does to it does not, since activation checkpointing runs forwards again there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, TreeSum, lane_ranges, subtrees
from lanewise.reduce.buffer import RESHAPED, Buffer, find_buffers
from lanewise.reduce.pending import add_into_right
from lanewise.world.accelerator import float64_device, start_copy_to_host
from lanewise.world.world import World

_Form = tuple[torch.Size, torch.dtype]


@dataclass
class _Lane:
    """What a lane made of the buffers."""

    turn: LaneTurn
    num_samples: int
    values: dict[int, torch.Tensor | None]
    """By number; without the unchanged ones, as soon as those are known."""
    changes: Callable[[], torch.Tensor]
    """Waits for the lane's forward, and tells of every buffer whether it changed."""

    def drop_unchanged(self) -> None:
        """Free the copies of what did not change."""
        if self.values:
            changes = self.changes().tolist()
            self.values = {number: value for number, value in self.values.items() if changes[number]}


class LaneBuffers:
    """Gives every lane the same starting buffers and merges what the lanes made of them.

    For each lane of a step `begin` and, after its forward, `end`; then `merge` or `discard`. Which buffers
    changed travels with the totals of the step, and those alone travel in one all-gather.

    Args:
        modules: whatever runs in a lane's forward, for each replica; read when the first lane begins.
        world: the processes.
        num_lanes: lanes of the run.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]], world: World, num_lanes: int) -> None:
        self._modules = modules
        self._world = world
        self._float64_device = float64_device(world.device)
        self._num_lanes = num_lanes
        self._lane_ranges = lane_ranges(num_lanes, world.world_size)
        # Each buffer on each replica.
        self._buffers: list[tuple[Buffer, ...]] | None = None
        self._lanes: list[_Lane] = []
        self._check: Callable[[], None] = lambda: None

    def begin(self, replica: int = 0) -> None:
        """Give a lane, on one of the replicas, the starting values."""
        if self._buffers is None:
            self._buffers = list(zip(*map(find_buffers, self._modules), strict=True))
            self._changes = torch.zeros(len(self._buffers), dtype=torch.float64, device=self._float64_device)
        if not self._buffers:
            return
        if replica == 0 and not self._lanes:
            self._begin_step()
        else:
            self.reset(replica)

    def reset(self, replica: int = 0) -> None:
        """Give a lane the starting values back, for another forward."""
        for buffers in self._buffers or ():
            buffers[replica].reset()

    def _begin_step(self) -> None:
        self.check()
        assert self._buffers is not None
        self._changes.zero_()
        for first, *others in self._buffers:  # the user may have written them between the steps
            first.note_start()
            for other in others:
                other.follow(first)

    def end(self, turn: LaneTurn, num_samples: int, replica: int = 0) -> None:
        """Note what a lane made of the buffers with so many samples."""
        if not self._buffers:
            return
        for lane in self._lanes[-1:]:  # whose forward is done by now
            lane.drop_unchanged()
        if not turn.positions:
            self._lanes.append(_Lane(turn, num_samples, {}, lambda: self._changes))
            return
        device = self._world.device
        looks = [buffers[replica].look() for buffers in self._buffers]
        changes = _stack([change for change, _ in looks], self._float64_device)
        torch.maximum(self._changes, changes, out=self._changes)
        values = {
            number: None if value is None else value.to(device)
            for number, (change, value) in enumerate(looks)
            if isinstance(change, torch.Tensor) or change
        }
        self._lanes.append(_Lane(turn, num_samples, values, start_copy_to_host(changes)))

    def changes(self) -> torch.Tensor | None:
        """Return what the lanes of this process tell of each buffer, for `merge`: float64 [num_buffers].

        None where there are no buffers.
        """
        return self._changes if self._buffers else None

    def discard(self) -> None:
        """Forget what the lanes of the step made of the buffers."""
        self._lanes = []
        for buffers in self._buffers or ():
            for buffer in buffers:
                buffer.reset()

    def merge(self, changes: Sequence[float]) -> None:
        """Merge the buffers over all lanes of the step. Collective: every rank must call this.

        Args:
            changes: for each buffer the largest that any process told by `changes`.

        Raises:
            TaskError: if lanes gave a buffer different shapes.
        """
        if not self._buffers:
            return
        lanes = [lane for lane in self._lanes if lane.turn.positions]
        for lane in lanes:
            lane.drop_unchanged()
        step, num_present = self._lanes[0].turn.step, self._lanes[0].turn.num_present_lanes
        changed = [number for number, change in enumerate(changes) if change]
        forms = {
            number: (start.shape, start.dtype)
            for number in changed
            if (start := self._buffers[number][0].start) is not None
        }
        if reshaped := [number for number in changed if changes[number] == RESHAPED]:
            forms |= self._agree_on_forms(reshaped, lanes, step)
        if changed:
            floats = {n: form for n, form in forms.items() if _is_averaged(form[1])}
            integers = {n: form for n, form in forms.items() if not _is_averaged(form[1])}
            means, of_first_lane = self._exchange(lanes, floats, integers, num_present)
            self._check = self._start_comparison(of_first_lane, lanes)
            for number, value in (means | of_first_lane).items():
                first, *others = self._buffers[number]
                first.start = value
                for other in others:
                    other.follow(first)
        self.discard()

    def check(self) -> None:
        """Raise what `merge` found; a call of its own, so that `merge` need not wait for a GPU.

        Raises:
            TaskError: if an integer buffer differed between lanes.
        """
        check, self._check = self._check, lambda: None
        check()

    def _value(self, lane: _Lane, number: int) -> torch.Tensor | None:
        """Return what a lane of this process made of a buffer."""
        assert self._buffers is not None
        return lane.values.get(number, self._buffers[number][0].start)

    def _agree_on_forms(self, numbers: Sequence[int], lanes: Sequence[_Lane], step: int) -> dict[int, _Form]:
        """Return shape and dtype of buffers that have another one than before. Collective."""
        local: dict[int, list[_Form | None]] = {}
        for number in numbers:
            values = [self._value(lane, number) for lane in lanes]
            local[number] = [None if value is None else (value.shape, value.dtype) for value in values]
        everywhere = self._world.all_gather_object(local)
        agreed: dict[int, _Form] = {}
        for number in numbers:
            forms = [form for rank_forms in everywhere for form in rank_forms[number]]
            assert self._buffers is not None
            other = next((form for form in forms if form != forms[0]), forms[0])
            if other != forms[0] or forms[0] is None:
                shapes = ["None" if form is None else str(tuple(form[0])) for form in (forms[0], other)]
                raise TaskError(
                    f"buffer {self._buffers[number][0].name} has another shape after step {step}: "
                    f"{' in some lanes and '.join(dict.fromkeys(shapes))}"
                    f"{' in others' if other != forms[0] else ''}. "
                    "Give it the same shape in every lane of a step."
                )
            agreed[number] = forms[0]
        return agreed

    def _exchange(
        self,
        lanes: Sequence[_Lane],
        floats: dict[int, _Form],
        integers: dict[int, _Form],
        num_present: int,
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return the means of float buffers, weighted by samples, and the first lane's integers. Collective.

        That is the first lane which has samples: one may lose all of them.

        Sums are float64. Integers travel beside them as they are.
        """
        device = self._float64_device
        one = torch.ones(1, dtype=torch.float64, device=device)
        local_sum: TreeSum[list[torch.Tensor]] = TreeSum(self._num_lanes, num_present, add_into_right)
        for lane in lanes:
            flat = [_to_float64(self._value(lane, number), device) for number in floats]
            local_sum.push((lane.turn.lane, lane.turn.lane + 1), [torch.cat([*flat, one]) * lane.num_samples])

        nodes = [subtrees(lanes, self._num_lanes, num_present) for lanes in self._lane_ranges]
        sizes = [_size_of(form) for form in floats.values()]
        sums = one.new_zeros(max(map(len, nodes)), sum(sizes) + 1)
        for index, (_, (subtree_sum,)) in enumerate(local_sum.pending):
            sums[index] = subtree_sum
        local_integers = self._integers_of_first(lanes, integers)
        sent = torch.cat([sums.flatten().view(torch.int64), local_integers])
        gathered = self._world.start_all_gather(sent)()

        tree_sum: TreeSum[list[torch.Tensor]] = TreeSum(self._num_lanes, num_present, add_into_right)
        for rank_nodes, rank_sent in zip(nodes, gathered, strict=True):
            rank_sums = rank_sent[: sums.numel()].view(torch.float64).view(sums.shape)
            for node, subtree_sum in zip(rank_nodes, rank_sums, strict=False):
                tree_sum.push(node, [subtree_sum.clone()])
        *totals, num_samples = tree_sum.root()[0].split([*sizes, 1])
        means = {
            number: _from_float64(total / num_samples, form).to(self._world.device)
            for (number, form), total in zip(floats.items(), totals, strict=True)
        }
        of_ranks = gathered[:, sums.numel() :]
        of_first = of_ranks.index_select(0, of_ranks[:, :1].argmax(dim=0))[0]  # on a GPU without waiting
        parts = of_first[1:].split([shape.numel() for shape, _ in integers.values()])
        of_first_lane = {
            number: part.view(shape).to(dtype).to(self._world.device)
            for (number, (shape, dtype)), part in zip(integers.items(), parts, strict=True)
        }
        return means, of_first_lane

    def _integers_of_first(self, lanes: Sequence[_Lane], integers: dict[int, _Form]) -> torch.Tensor:
        """Return 1 and the integers of this process's first lane with samples; zeros if it has none."""
        device = self._float64_device
        for lane in lanes:
            if lane.num_samples:
                values = [_to_int64(self._value(lane, number), device) for number in integers]
                return torch.cat([torch.ones(1, dtype=torch.int64, device=device), *values])
        size = 1 + sum(shape.numel() for shape, _ in integers.values())
        return torch.zeros(size, dtype=torch.int64, device=device)

    def _start_comparison(
        self, of_first_lane: dict[int, torch.Tensor], lanes: Sequence[_Lane]
    ) -> Callable[[], None]:
        """Compare the integer buffers of this process's lanes with those of the first lane.

        Returns:
            A function that waits for the comparison and raises TaskError where they differ.
        """
        assert self._buffers is not None
        compared = [
            (self._buffers[number][0].name, lane.turn, value, expected)
            for number, expected in of_first_lane.items()
            for lane in lanes
            if lane.num_samples
            if (value := self._value(lane, number)) is not None
        ]
        if not compared:
            return lambda: None
        wait = start_copy_to_host(
            torch.stack([(value != expected).any() for _, _, value, expected in compared])
        )

        def check() -> None:
            for differs, (name, turn, value, expected) in zip(wait().tolist(), compared, strict=True):
                if differs:
                    raise TaskError(
                        f"integer buffer {name} differs between the lanes of step {turn.step}: "
                        f"lane {turn.lane} made {value.tolist()} of it, and the first {expected.tolist()}. "
                        "Make it a float buffer, or equal in all lanes."
                    )

        return check


def _stack(changes: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Make one float64 tensor of numbers, some of which may be on a GPU."""
    if not any(isinstance(change, torch.Tensor) for change in changes):
        return torch.tensor(changes, dtype=torch.float64, device=device)
    return torch.stack(
        [
            change.to(device).double()
            if isinstance(change, torch.Tensor)
            else torch.as_tensor(change, dtype=torch.float64, device=device)
            for change in changes
        ]
    )


def _is_averaged(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _size_of(form: _Form) -> int:
    """Return how many float64 numbers hold a buffer of this shape and dtype."""
    shape, dtype = form
    return shape.numel() * (2 if dtype.is_complex else 1)


def _to_float64(value: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    assert value is not None
    value = value.to(device)  # first, where the one it is on has no float64
    if value.is_complex():
        value = torch.view_as_real(value.to(torch.complex128).resolve_conj())
    return value.double().flatten()


def _from_float64(flat: torch.Tensor, form: _Form) -> torch.Tensor:
    shape, dtype = form
    if dtype.is_complex:
        return torch.view_as_complex(flat.clone().view(*shape, 2)).to(dtype)
    return flat.view(shape).to(dtype)


def _to_int64(value: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    assert value is not None
    return value.to(device).long().flatten()
