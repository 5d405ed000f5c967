"""Refuses a forward, loss or backward that changes parameters, or buffers which no process merges."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lanewise.engine.buffers.buffers import StepState
from lanewise.engine.buffers.partly_written import NORMALISATION
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.accelerator import start_copy_to_host
from lanewise.processes.device.tensor_bytes import checksum
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
    the first one a teacher may equal its student. Buffers of modules that are no part of the model, as the
    centre in a criterion, are looked at too: the lanes' changes of them are never merged.

    Args:
        reducer: holds the model.
        world: the processes.
        others: further parameters that the user holds, by name.
        modules: modules that the user holds, by name.
        step_state: the buffers that no lane may write.
    """

    def __init__(
        self,
        reducer: Reducer,
        world: World,
        others: Mapping[str, nn.Parameter],
        modules: Mapping[str, nn.Module],
        step_state: StepState,
    ) -> None:
        model = reducer.replicas[0]
        self._reducer = reducer
        self._world = world
        self._modules = modules
        self._step_state = step_state
        self._buffers: dict[str, int] = {}
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
        """See `Look`. Collective where parameters are sharded."""
        self._replica = -1
        if self._before is None:
            self._before = self._look()
            self._buffers = self._look_at_buffers()
            sums = {name: state.checksum for name, state in zip(self._named, self._before, strict=True)}
            if own := {name: sums[name] for name, parameter in self._named.items() if is_sharded(parameter)}:
                of_ranks = self._world.all_gather_tree(own)
                self._whole = {name: _wrapped(sum(of_rank[name] for of_rank in of_ranks)) for name in own}
            sums |= self._whole
            trained = [sums[name] for name, parameter in self._named.items() if parameter.requires_grad]
            self._first = self._first or trained
            self._is_updated = trained != self._first

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        """See `Look`."""
        self._replica = (self._replica + 1) % len(self._reducer.replicas)
        self._require_unchanged(turn, "forward or the loss")

    def after_backward(self, turn: LaneTurn) -> None:
        """See `Look`."""
        self._require_unchanged(turn, "backward")

    def finish(self, totals: StepTotals) -> bool:
        """See `Look`."""
        self._before = None
        return self._is_updated

    def _require_unchanged(self, turn: LaneTurn, where: str) -> None:
        assert self._before is not None
        first = turn.lane - self._replica  # of the round
        for name, before, now in zip(self._named, self._before, self._look(), strict=True):
            if now != before:
                self._refuse(name, turn._replace(lane=first), where)
        for lane, replica in enumerate(self._reducer.replicas[1:], first + 1):
            copies = _checksums(replica.parameters())
            for name, before, of_copy in zip(self._named, self._before, copies, strict=False):
                if of_copy != before.checksum:
                    self._refuse(name, turn._replace(lane=lane), where)
        for parameter, name in self._reducer.gathered_parameters().items():
            is_other = parameter._version != self._gathered.setdefault(parameter, parameter._version)
            is_there = parameter.untyped_storage().nbytes() and parameter.dtype == self._named[name].dtype
            if is_other or (is_there and _checksums([parameter]) != [self._whole[name]]):
                self._refuse(name, turn, where)
        for name, of_buffer in self._look_at_buffers().items():
            if of_buffer != self._buffers.get(name) and name in self._names_of_step_state():
                raise TaskError(
                    f"buffer {name} changed in the {where} of lane {turn.lane} in step {turn.step + 1}, and "
                    "step_state says that no lane writes it. Give what is new in Loss(..., gather=...) or "
                    "total=..., and write the buffer in after_update, once in a step (docs/state.md); or "
                    "leave it out of step_state: then it becomes the mean over the lanes."
                )
            if of_buffer != self._buffers.get(name):
                raise TaskError(
                    f"buffer {name} changed in the {where} of lane {turn.lane} in step {turn.step + 1}, and "
                    "is no part of the model. Each process runs some of the lanes only, so every number of "
                    "devices would have another one. Make its module a part of the module that build_model "
                    "returns: then each lane begins with the buffer of the start of the step, and it becomes "
                    "the mean over the lanes. Put a module that is only read into evaluation mode."
                )

    def _look(self) -> list[_State]:
        """Return the state of the part of each parameter that this process has. Waits for the device."""
        named: Iterable[Any] = self._named.values()
        with torch.no_grad():
            own = [parameter.to_local() if is_sharded(parameter) else parameter for parameter in named]
        return [
            _State(0, 0, checksum)
            if whole in self._moves
            else _State(part._version, part.data_ptr(), checksum)
            for whole, part, checksum in zip(self._named.values(), own, _checksums(own), strict=True)
        ]

    def _look_at_buffers(self) -> dict[str, int]:
        """Return the checksum of each buffer, but for statistics that normalisation does not read now."""
        own = set(self._reducer.replicas[0].modules())
        buffers = {
            f"{name}.{inner}": buffer
            for name, held in self._modules.items()
            for prefix, module in held.named_modules()
            if module not in own and not (isinstance(module, NORMALISATION) and module.training)
            for inner, buffer in module.named_buffers(prefix, recurse=False)
        }
        for place in self._step_state[0] if self._step_state else ():
            if place.tensor is not None:
                buffers[place.name] = place.tensor
        return dict(zip(buffers, _checksums(buffers.values()), strict=True)) if buffers else {}

    def _names_of_step_state(self) -> set[str]:
        return {place.name for place in self._step_state[0]} if self._step_state else set()

    def _refuse(self, name: str, turn: LaneTurn, where: str) -> None:
        raise TaskError(
            f"parameter {name} changed in the {where} of lane {turn.lane} in step {turn.step + 1}. Each "
            "process runs some of the lanes only, so every number of devices would train another model. "
            "Leave updates to the optimizer, which steps after all lanes. Change other weights once in a "
            "step, after it: in the task's after_update, or in a loop of your own (docs/state.md). Where a "
            "forward needs other weights for a while, use torch.func.functional_call. Instead of "
            "nn.Embedding(max_norm=...) limit the norm in the forward, without changing the weights."
        )


def held_parameters(task: object) -> dict[str, nn.Parameter]:
    """Return parameters in attributes of a task, by name: of a criterion, a teacher, or the model itself."""
    held = {f"task.{name}": value for name, value in vars(task).items() if isinstance(value, nn.Parameter)}
    for prefix, module in held_modules(task).items():
        held |= {f"{prefix}.{name}": parameter for name, parameter in module.named_parameters()}
    return held


def held_modules(task: object) -> dict[str, nn.Module]:
    """Return modules in attributes of a task, by name, also in a list or a dict."""
    held: dict[str, Any] = {}
    for name, value in vars(task).items():
        if isinstance(value, dict):
            held |= {f"task.{name}.{key}": held_value for key, held_value in value.items()}
        elif isinstance(value, list | tuple):
            held |= {f"task.{name}.{number}": held_value for number, held_value in enumerate(value)}
        else:
            held[f"task.{name}"] = value
    return {name: held_value for name, held_value in held.items() if isinstance(held_value, nn.Module)}


def _wrapped(total: int) -> int:
    """Return a sum as int64 holds it."""
    return (total + 2**63) % 2**64 - 2**63


def _checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    sums = [checksum(tensor) for tensor in tensors]
    on_host = start_copy_to_host(torch.stack([total.to(sums[0].device) for total in sums]))()
    return list(map(int, on_host.tolist()))
