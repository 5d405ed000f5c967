"""Refuses a forward, loss or backward that changes parameters."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lanewise.engine.reachable import walk
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.tensor_bytes import checksums
from lanewise.processes.world.shards import is_sharded
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer


class _State(NamedTuple):
    """What tells that a parameter is as it was, without a copy of it."""

    version: int
    """Does not count what is written through `data`."""
    address: int
    checksum: int
    """Does not see a teacher that is set to what it was, as long as its student has not been updated."""


@final
class ChangedParameters(Look):
    """Looks at every parameter around each lane's forward, loss and backward.

    Each process runs some lanes only, one after the other, so such a change would train another model on
    every number of processes. It looks until the end of the first step that began with updated weights: in
    the first one a teacher may equal its student.

    Args:
        reducer: holds the model.
        world: the processes.
        others: further parameters that the user holds, by name.
    """

    def __init__(self, reducer: Reducer, world: World, others: Mapping[str, nn.Parameter]) -> None:
        model = reducer.model
        self._reducer = reducer
        self._world = world
        own = dict(model.named_parameters())
        self._named = own | {
            name: parameter for name, parameter in others.items() if parameter not in set(own.values())
        }
        # cuDNN lays the weights of a recurrent layer out anew, with equal values.
        layers = (layer for layer in model.modules() if isinstance(layer, nn.RNNBase))
        self._moves = {parameter for layer in layers for parameter in layer.parameters()}
        self._gathered: dict[torch.Tensor, int] = {}
        """Versions of what fsdp gathered, which only the user's code changes."""
        self._whole: dict[str, int] = {}
        """The checksum of each sharded parameter over all processes."""
        self._before: list[_State] | None = None
        self._first: list[int] | None = None
        self._is_updated = False

    def begin(self, turn: LaneTurn) -> None:
        """Collective where parameters are sharded."""
        self._replica = -1
        if self._before is None:
            self._before = self._states()
            sums = {name: state.checksum for name, state in zip(self._named, self._before, strict=True)}
            if own := {name: sums[name] for name, parameter in self._named.items() if is_sharded(parameter)}:
                of_ranks = self._world.all_gather_tree(own)
                self._whole = {name: _wrapped(sum(of_rank[name] for of_rank in of_ranks)) for name in own}
            sums |= self._whole
            trained = [sums[name] for name, parameter in self._named.items() if parameter.requires_grad]
            self._first = self._first or trained
            self._is_updated = trained != self._first

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        self._replica = (self._replica + 1) % len(self._reducer.replicas)
        self._require_unchanged(turn, "forward or the loss")

    def after_backward(self, turn: LaneTurn) -> None:
        self._require_unchanged(turn, "backward")

    def finish(self, totals: StepTotals) -> bool:
        self._before = None
        return self._is_updated

    def _require_unchanged(self, turn: LaneTurn, where: str) -> None:
        assert self._before is not None
        first = turn.lane - self._replica  # of the round
        for name, before, now in zip(self._named, self._before, self._states(), strict=True):
            if now != before:
                self._refuse(name, turn._replace(lane=first), where)
        for lane, replica in enumerate(self._reducer.replicas[1:], first + 1):
            copies = checksums(replica.parameters())
            for name, before, of_copy in zip(self._named, self._before, copies, strict=False):
                if of_copy != before.checksum:
                    self._refuse(name, turn._replace(lane=lane), where)
        for parameter, name in self._reducer.gathered_parameters().items():
            is_other = parameter._version != self._gathered.setdefault(parameter, parameter._version)
            is_there = parameter.untyped_storage().nbytes() and parameter.dtype == self._named[name].dtype
            if is_other or (is_there and checksums([parameter]) != [self._whole[name]]):
                self._refuse(name, turn, where)

    def _states(self) -> list[_State]:
        """Return the state of the part of each parameter that this process has. Waits for the device."""
        named: Iterable[Any] = self._named.values()
        with torch.no_grad():
            own = [parameter.to_local() if is_sharded(parameter) else parameter for parameter in named]
        return [
            _State(0, 0, checksum)
            if whole in self._moves
            else _State(part._version, part.data_ptr(), checksum)
            for whole, part, checksum in zip(self._named.values(), own, checksums(own), strict=True)
        ]

    def _refuse(self, name: str, turn: LaneTurn, where: str) -> None:
        raise TaskError(
            f"parameter {name} changed in the {where} of lane {turn.lane} in step {turn.step + 1}. Each "
            "process runs some of the lanes only, so every number of devices would train another model. "
            "Leave updates to the optimizer, which steps after all lanes. Change other weights once in a "
            "step, after it: in the task's after_update, or in a loop of your own (docs/losses.md). Where a "
            "forward needs other weights for a while, use torch.func.functional_call. Instead of "
            "nn.Embedding(max_norm=...) limit the norm in the forward, without changing the weights."
        )


def held_parameters(model: nn.Module, others: Mapping[str, object]) -> dict[str, nn.Parameter]:
    """Return parameters that others hold and are none of the model: of a criterion, or a teacher."""
    found = [
        held for held in walk(model, others, into_datasets=False) if isinstance(held.value, nn.Parameter)
    ]
    return {held.name: held.value for held in found if held.name.partition(".")[0] in others}


def _wrapped(total: int) -> int:
    """Return a sum as int64 holds it."""
    return (total + 2**63) % 2**64 - 2**63
