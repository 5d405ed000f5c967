"""Merges the buffers of a model (BatchNorm's statistics) when several lanes change them in one step.

Each lane starts from the values at the start of the step. Afterwards, a float buffer that some lane changed
becomes the mean of the lanes' values, weighted by their sample counts and added in the tree; an integer or
boolean buffer must be equal in all lanes. So buffers depend on the lanes and not on the processes, in both
grades.

Values are compared in every step to see whether a lane changed a buffer: batch_norm's kernel writes its
statistics without a new version, and a buffer may change in some steps only. The values after a lane's
forward count. Changes in its backward do not, since activation checkpointing runs forwards again there.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import nn

from lanewise.engine.buffers.merge import is_averaged, merge_buffers
from lanewise.engine.buffers.pack import (
    RESHAPED,
    BufferPack,
    BufferPlace,
    Form,
    PackSnapshot,
    as_meta,
    forms_of,
    kind_of,
    pack_buffers,
)
from lanewise.engine.buffers.partly_written import name_partly_written
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.device.accelerator import float64_device, start_copy_to_host
from lanewise.processes.world.world import World

StepState: TypeAlias = Sequence[Sequence[BufferPlace]]
"""For each replica, the places of the buffers that no lane writes, in one order."""


@dataclass
class _Lane:
    """The buffers after the forward of one lane."""

    turn: LaneTurn
    num_samples: int
    held: dict[int, PackSnapshot]
    """What the packs hold, by their numbers; after `drop_unchanged` without unchanged packs."""
    changes: Callable[[], Sequence[float]]
    """Waits for the lane's forward, and returns the change of each pack: 0, CHANGED or RESHAPED."""

    def drop_unchanged(self) -> None:
        """Free the copies of the packs that did not change. Waits for the lane's forward."""
        if self.held:
            changes = self.changes()
            self.held = {number: one for number, one in self.held.items() if changes[number]}


@final
class LaneBuffers:
    """Gives every lane the same buffers at its start, and merges the buffers of all lanes after the step.

    For each lane of a step call `begin` and, after its forward, `end`; then once `merge` or `discard`. The
    processes exchange with the totals of the step which packs changed, and then the changed packs in one
    all-gather.

    Args:
        modules: for each replica, all modules whose forward runs in a lane; read when the first lane begins.
        world: the processes.
        placement: which process carries which lanes.
        step_state: which buffers are not merged; read when the first lane begins.
    """

    def __init__(
        self,
        modules: Sequence[Collection[nn.Module]],
        world: World,
        placement: Placement,
        step_state: StepState = (),
    ) -> None:
        self.modules = modules
        self.step_state = step_state
        self._world = world
        self._float64_device = float64_device(world.device)
        self._is_one_device = world.world_size == 1 and len(modules) == 1
        self._placement = placement
        self.are_any = True
        """Whether there may be any; known when the first lane has begun, and then nothing else is called."""
        # For each pack, its copies on all replicas.
        self._packs: list[tuple[BufferPack, ...]] | None = None
        self._large: list[tuple[int, BufferPack]] = []
        """By their numbers, those of the first replica that may share the memory of the start."""
        self._num_begun = 0
        self._lanes: list[_Lane] = []
        self._check: Callable[[], None] = lambda: None
        self._names_parts = True
        """Whether buffers of which lanes write a part each are named, in the first step that changes any."""
        self.changes: list[float] | torch.Tensor = []
        """The largest change of each pack in any lane of this process so far: 0, CHANGED or RESHAPED. On an
        accelerator it is a tensor, float64 [num_packs], for which nobody has waited."""

    def begin(self) -> None:
        """Give a lane, on the replica that is next, the values at the start of the step."""
        if self._packs is None:
            self._packs, self.changes = self._find_packs(), []
            self.are_any = bool(self._packs) or len(self.step_state) > 1
        if not self.are_any:
            return
        if self._num_begun:
            for packs in self._packs:
                packs[self._num_begun % len(packs)].reset()
        else:
            self._begin_step()
        self._num_begun += 1

    def reset(self) -> None:
        """Give the first replica the values at the start of the step again."""
        for first, *_ in self._packs or ():
            first.reset()

    def _find_packs(self) -> list[tuple[BufferPack, ...]]:
        left_out = [place for places in self.step_state for place in places]
        packs = [pack_buffers(modules, left_out) for modules in self.modules]
        self._large = [(number, pack) for number, pack in enumerate(packs[0]) if pack.is_large]
        return list(zip(*packs, strict=True))

    def _begin_step(self) -> None:
        self.check()
        assert self._packs is not None
        if not all(pack.has_its_forms for packs in self._packs for pack in packs):
            self._packs = self._find_packs()
        self.changes = [0.0] * len(self._packs)
        if self._world.device.type != "cpu":
            self.changes = torch.zeros(len(self._packs), dtype=torch.float64, device=self._float64_device)
        for first, *others in self._packs:  # the user may have written buffers between the steps
            first.note_start()
            for other in others:
                other.follow(first)
        for first_place, *other_places in zip(*self.step_state, strict=True):
            for place in other_places:
                if place.tensor is not None and first_place.tensor is not None:
                    place.tensor.copy_(first_place.tensor)

    def end(self, turn: LaneTurn, num_samples: int) -> None:
        """Record the buffers after the forward of a lane with `num_samples` samples."""
        if not self._packs:
            return
        for lane in self._lanes[-1:]:  # whose forward is done by now
            lane.drop_unchanged()
        # The only lane of a step, on the only device, leaves its buffers in the module.
        if not turn.positions or (len(turn.present) == 1 and self._is_one_device):
            self._lanes.append(_Lane(turn, num_samples, {}, lambda: ()))
            return
        held = [packs[len(self._lanes) % len(packs)].snapshot() for packs in self._packs]
        kept = {
            number: one._replace(values=None if one.values is None else one.values.to(self._world.device))
            for number, one in enumerate(held)
            if isinstance(one.change, torch.Tensor) or one.change
        }
        self._lanes.append(_Lane(turn, num_samples, kept, self._add_changes([one.change for one in held])))

    def _add_changes(self, changes: Sequence[float | torch.Tensor]) -> Callable[[], Sequence[float]]:
        """Merge a lane's change of each pack into `changes`; return a function that waits for its values."""
        if isinstance(self.changes, list):
            known = list(map(float, changes))
            self.changes = list(map(max, self.changes, known))
            return lambda: known
        device = self._float64_device
        on_device = torch.stack([torch.as_tensor(change, device=device).double() for change in changes])
        torch.maximum(self.changes, on_device, out=self.changes)
        wait = start_copy_to_host(on_device)
        return lambda: wait().tolist()

    def discard(self) -> None:
        """Discard the lanes' changes: put the buffers back to the start of the step."""
        self._lanes, self._num_begun = [], 0
        for packs in self._packs or ():
            for pack in packs:
                pack.reset()

    def merge(self, changes: Sequence[float]) -> None:
        """Merge the buffers over all lanes of the step. Collective: every rank must call this.

        Args:
            changes: for each pack the largest change that `changes` had on any process.

        Raises:
            TaskError: if lanes gave a buffer different shapes.
        """
        if not self._packs:
            self._num_begun = 0
            return
        if len(self._lanes[0].turn.present) == 1 and self._is_one_device:
            self._lanes, self._num_begun = [], 0
            for number, pack in self._large:
                pack.end_step(is_changed=changes[number] > 0)
            return
        lanes = [lane for lane in self._lanes if lane.turn.positions]
        for lane in lanes:
            lane.drop_unchanged()
        forms = {number: self._packs[number][0].forms for number, change in enumerate(changes) if change}
        kinds = {number: self._packs[number][0].kind for number in forms}
        if reshaped := [number for number, change in enumerate(changes) if change == RESHAPED]:
            forms |= self._agree_on_forms(reshaped, lanes)
            kinds |= {number: kind_of(forms[number]) for number in reshaped}
        if forms:
            values = [{number: self._value(lane, number) for number in forms} for lane in lanes]
            num_samples = [(lane.turn.lane, lane.num_samples) for lane in lanes]
            present = self._lanes[0].turn.present
            if self._names_parts and not reshaped:
                name_partly_written([packs[0] for packs in self._packs], values, self._world)
                self._names_parts = False
            merged = merge_buffers(self._world, self._placement, present, num_samples, values, kinds)
            self._check = self._start_comparison(lanes, values, merged)
            for number, value in merged.items():
                first, *others = self._packs[number]
                first.begin_with(value, forms[number])
                for other in others:
                    other.follow(first)
        self.discard()
        for number, pack in self._large:
            pack.end_step(is_changed=changes[number] > 0)
        if reshaped:  # buffers may belong to other packs now
            self._packs = None

    def check(self) -> None:
        """Raise the error that `merge` found; separate from `merge`, which so need not wait for a GPU.

        Raises:
            TaskError: if an integer buffer differed between lanes.
        """
        check, self._check = self._check, lambda: None
        check()

    def _value(self, lane: _Lane, number: int) -> torch.Tensor:
        """Return the values of a pack after a lane of this process; some lane of the step changed it."""
        assert self._packs is not None
        start = self._packs[number][0].start
        one = lane.held.get(number)
        value = one.values if one is not None else None if start is None else start.clone()
        assert value is not None
        return value

    def _agree_on_forms(
        self, numbers: Sequence[int], lanes: Sequence[_Lane]
    ) -> dict[int, Sequence[Form | None]]:
        """Return the new forms of packs in which some lane reshaped a buffer. Collective.

        Raises:
            TaskError: if the lanes gave a buffer different forms, or one made it None.
        """
        assert self._packs is not None
        packs = {number: self._packs[number][0] for number in numbers}
        local = [
            {number: as_meta(lane.held[number].forms if number in lane.held else pack.forms)}
            for lane in lanes
            for number, pack in packs.items()
        ]
        everywhere = [of_lane for of_rank in self._world.all_gather_tree(local) for of_lane in of_rank]
        agreed: dict[int, Sequence[Form | None]] = {}
        for number, pack in packs.items():
            of_lanes = [forms_of(of_lane[number]) for of_lane in everywhere if number in of_lane]
            for name, first, *others in zip(pack.names, *of_lanes, strict=True):
                other = next((form for form in others if form != first), first)
                if other != first or first is None:
                    shapes = [str(tuple(form[0])) if form else "None" for form in (first, other)]
                    raise TaskError(
                        f"buffer {name} has another shape after step {self._lanes[0].turn.step + 1}: "
                        f"{' in some lanes and '.join(dict.fromkeys(shapes))}"
                        f"{' in others' if other != first else ''}. "
                        "Give it the same shape in every lane of a step."
                    )
            agreed[number] = of_lanes[0]
        return agreed

    def _start_comparison(
        self,
        lanes: Sequence[_Lane],
        values: Sequence[dict[int, torch.Tensor]],
        merged: dict[int, torch.Tensor],
    ) -> Callable[[], None]:
        """Begin to compare the integer buffers of this process's lanes with those of the first lane.

        Returns:
            A function that waits for the comparison, and raises TaskError if they differ.
        """
        compared = [
            (number, lane, of_lane[number].flatten(), expected)
            for number, expected in merged.items()
            if not is_averaged(expected.dtype)
            for lane, of_lane in zip(lanes, values, strict=True)
            if lane.num_samples and of_lane[number] is not expected
        ]
        if not compared:
            return lambda: None
        wait = start_copy_to_host(
            torch.stack([(value != expected).any() for _, _, value, expected in compared])
        )

        assert self._packs is not None
        packs = self._packs  # `merge` may let go of them

        def check() -> None:
            for differs, (number, lane, value, expected) in zip(wait().tolist(), compared, strict=True):
                if differs:
                    _refuse(packs[number][0], lane.turn, value, expected)

        return check


def _refuse(pack: BufferPack, turn: LaneTurn, value: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise TaskError for the first buffer of a pack of integers in which a lane differs."""
    for name, made, other in zip(pack.names, pack.split(value), pack.split(expected), strict=True):
        if not torch.equal(made, other):
            raise TaskError(
                f"integer buffer {name} differs between the lanes of step {turn.step + 1}: "
                f"lane {turn.lane} made {made.tolist()} of it, and the first {other.tolist()}. "
                "What all lanes make together, such as a queue or counts, is written after the update "
                "(docs/losses.md). Register a statistic as a float buffer, which is averaged. In a "
                "module of others settle it in build_model: calibrate an observer of quantisation-aware "
                "training there, by forwards after prepare_qat, and switch it off by "
                "model.apply(torch.ao.quantization.disable_observer)."
            )
