"""Joins what the lanes of a step give for the whole step: rows in lane order, and totals added in the tree.

How many rows a lane has travels with the step's message, which the rows and totals follow: the rows of all
lanes in one all-gather, the totals in one sum for each of their types, as gradients are summed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from lanewise.data import LaneBatch
from lanewise.engine.step.parts import NO_PARTS, LaneParts, map_parts
from lanewise.engine.step.rows import gather_rows, row_bytes
from lanewise.engine.step.wire import LaneRow, Term
from lanewise.errors import MOST_SHOWN, TaskError
from lanewise.lanes import Placement, TreeSum
from lanewise.processes.device.nested import tensors_in
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer
from lanewise.reduce.pending import new_tree_sum

_NOTHING, _GIVES, _MISMATCH = 0, 1, -1
"""What a lane tells: that it gives nothing, as one without samples; that it gives its parts; or others than
the first step fixed."""


class Joined(NamedTuple):
    """What all lanes of a step gave, the same on every process."""

    num_samples: int
    """The samples of all lanes."""
    gathered: Mapping[str, Any]
    """The rows of all lanes in lane order, by name."""
    totals: Mapping[str, Any]
    """The sums over all lanes, by name: of integers int64, of bf16 and fp16 float32."""


@final
class Joining:
    """Collects the parts of this process's lanes, and joins them with those of the others.

    Their form is fixed in the first step with samples, in which the processes agree on it.

    Args:
        reducer: adds totals up.
        world: the processes.
        placement: which process carries which lanes.
        is_on: whether the samples of a step are counted even if no loss gives parts.
    """

    def __init__(self, reducer: Reducer, world: World, placement: Placement, *, is_on: bool) -> None:
        self._reducer = reducer
        self._world = world
        self._placement = placement
        self.is_on = is_on
        """Whether lanes tell something here; fixed by the first step."""
        self.form: str | None = None
        """The form of the parts of each lane; None before the first step with samples."""
        self._template = NO_PARTS
        self._early: list[tuple[LaneBatch, LaneParts | None]] = []
        """What lanes gave in the first step before there was a form."""
        self._begin()

    def _begin(self) -> None:
        self._terms: dict[int, tuple[Term, ...]] = {}
        self._rows: list[list[torch.Tensor]] = []
        self._sums: dict[torch.dtype, TreeSum[list[torch.Tensor]]] = {}
        self.mismatches: list[tuple[int, str]] = []
        """The lanes of this process that give something else than the first step fixed, and what."""

    def add(self, batch: LaneBatch, parts: LaneParts | None) -> None:
        """Add what a lane gives; None where it gives nothing, as one without samples."""
        if parts is not None:  # copied: the next lane may change it
            parts = LaneParts(*(map_parts(self._copied, part) for part in parts))
        if self.form is None:
            self._early.append((batch, parts))
            return
        state = _NOTHING if parts is None else _GIVES
        if parts is not None and parts.form != self.form:
            self.mismatches.append((batch.turn.lane, parts.form or "nothing"))
            state, parts = _MISMATCH, None
        if not self.is_on:
            return
        rows = [] if parts is None else list(tensors_in(parts.gather))
        sizes = [len(leaf) for leaf in rows] or [0] * self._num_gathered
        self._terms[batch.turn.lane] = (Term(state, batch.num_samples), *(Term(size, 0.0) for size in sizes))
        if rows:
            self._rows.append(rows)
        totals = self._flat_totals(self._template.total if parts is None else parts.total)
        for dtype, flat in totals.items():
            if dtype not in self._sums:
                self._sums[dtype] = new_tree_sum(self._placement.num_lanes, batch.turn.present)
            self._sums[dtype].push((batch.turn.lane, batch.turn.lane + 1), [flat])

    def _copied(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(self._world.device, copy=True)

    def offer(self) -> list[Any]:
        """Return the first lane of each form with what `agree` needs of it."""
        given = {parts.form: (batch.turn.lane, parts) for batch, parts in self._early if parts is not None}
        return [(lane, form, *parts.template) for form, (lane, parts) in given.items()]

    def agree(self, offers: Sequence[Sequence[Any]], step: int) -> None:
        """Fix the form by what `offer` returned on each process.

        Raises:
            TaskError: on every rank, if lanes give different parts.
        """
        offered = [offer for of_rank in offers for offer in of_rank]
        if len({form for _, form, _, _ in offered}) > 1:
            _refuse([(lane, form or "nothing") for lane, form, _, _ in offered], step)
        self.form = ""
        if offered:
            _, self.form, *template = offered[0]
            self._template = LaneParts(*template)
        self.is_on = self.is_on or bool(self.form)
        self._num_gathered = len(list(tensors_in(self._template.gather)))
        early, self._early = self._early, []
        for batch, parts in early:
            self.add(batch, parts)
        self.form = self.form if offered else None  # a step without samples fixes none

    @property
    def num_terms(self) -> int:
        """How many terms a lane has in the message of a step for this."""
        return 1 + self._num_gathered if self.is_on else 0

    def terms(self, lane: int) -> tuple[Term, ...]:
        """Return what a lane tells: its state and samples, and how many rows it has in each tensor."""
        return self._terms[lane]

    def join(self, lanes: Sequence[LaneRow], batch: LaneBatch) -> Joined:
        """Return what the lanes gave. Collective: every rank must call this.

        Args:
            lanes: the last terms of whose rows are for this.
            batch: one of the step.

        Raises:
            TaskError: on every rank, if a lane gave other parts than the lanes of the first step.
        """
        terms_of = {row.lane: row.terms[-self.num_terms :] for row in lanes}
        if any(terms[0].value == _MISMATCH for terms in terms_of.values()):
            self.refuse_mismatches(self._world.all_gather_tree(self.mismatches), batch.turn.step)
        num_samples = int(sum(float(terms[0].weight) for terms in terms_of.values()))
        gathered = self._gather(
            {lane: [int(term.value) for term in terms[1:]] for lane, terms in terms_of.items()}
        )
        totals = self._add_up(batch)
        self._begin()
        rows, sums = iter(gathered), {dtype: iter(of_dtype) for dtype, of_dtype in totals.items()}
        return Joined(
            num_samples,
            map_parts(lambda _: next(rows), self._template.gather),
            map_parts(lambda leaf: next(sums[_added_as(leaf.dtype)]), self._template.total),
        )

    def refuse_mismatches(self, of_ranks: Sequence[Sequence[tuple[int, str]]], step: int) -> None:
        """Raise TaskError if a process has mismatches."""
        if mismatches := [mismatch for of_rank in of_ranks for mismatch in of_rank]:
            _refuse([("of the first step", self.form or "nothing"), *mismatches], step)

    def _gather(self, sizes: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
        """Return each gathered tensor with the rows of all lanes, by how many each lane has."""
        own = [
            torch.cat(of_lanes).contiguous()
            for of_lanes in zip(*(self._empty_rows(), *self._rows), strict=True)
        ]
        if self._world.world_size == 1 or not any(map(any, sizes.values())):
            return own
        num_rows = [
            [sum(sizes[lane][number] for lane in lanes if lane in sizes) for number in range(len(own))]
            for lanes in self._placement.ranges
        ]
        most = max(
            sum(size * row_bytes(tensor) for size, tensor in zip(of_rank, own, strict=True))
            for of_rank in num_rows
        )
        return gather_rows(own, num_rows, most, self._world)

    def _empty_rows(self) -> list[torch.Tensor]:
        return [
            torch.empty_like(leaf, device=self._world.device) for leaf in tensors_in(self._template.gather)
        ]

    def _flat_totals(self, total: Mapping[str, Any]) -> dict[torch.dtype, torch.Tensor]:
        """Return the totals of a lane as a flat tensor for each type; zeros of a template."""
        flat: dict[torch.dtype, list[torch.Tensor]] = {}
        for leaf in tensors_in(total):
            values = torch.zeros_like(leaf, device=self._world.device) if leaf.is_meta else leaf
            flat.setdefault(_added_as(leaf.dtype), []).append(values.flatten())
        return {dtype: torch.cat([leaf.to(dtype) for leaf in leaves]) for dtype, leaves in flat.items()}

    def _add_up(self, batch: LaneBatch) -> dict[torch.dtype, list[torch.Tensor]]:
        """Return the totals of all lanes, by type."""
        added: dict[torch.dtype, list[torch.Tensor]] = {}
        for dtype, zeros in self._flat_totals(self._template.total).items():
            pending = self._sums[dtype].pending if dtype in self._sums else []
            sums = [flat for _, (flat,) in pending]
            total = self._reducer.sum_subtrees(sums, batch.turn.present, zeros)
            leaves = [leaf for leaf in tensors_in(self._template.total) if _added_as(leaf.dtype) is dtype]
            parts = total.split([leaf.numel() for leaf in leaves])
            added[dtype] = [part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        return added


def _added_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which totals are added: integers exactly."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def _refuse(forms: Sequence[tuple[int | str, str]], step: int) -> None:
    """Raise TaskError about lanes that give different parts, of which the first is right."""
    listed = "\n".join(f"  lane {lane}: {form}" for lane, form in forms[: MOST_SHOWN + 1])
    raise TaskError(
        f"the lanes of step {step + 1} give different things to gather or to add up:\n{listed}\n"
        "Each lane that has samples must give the same names from the first step on, with equal containers, "
        "dtypes and shapes; only the number of rows may differ, and be 0 (docs/losses.md)."
    )
