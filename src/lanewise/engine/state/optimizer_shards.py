"""Shards the optimizer's state over processes that have the whole model, as in stage 1 of ZeRO.

[Note: whole parameters]
Each process updates some of the parameters and sends them to the others (Rajbhandari et al., "ZeRO: memory
optimizations toward training trillion parameter models", SC'20). Parameters are assigned whole, so an
optimizer that needs a whole parameter, such as Adafactor or Muon, computes the same bytes as without
sharding. The optimizer's groups hold fewer parameters only while it steps. At all other times a scheduler, or
any other code, sees the user's own optimizer, of its own class and with all parameters in its groups.

torch's ZeroRedundancyOptimizer assigns the parameters in the same way. But it replaces the optimizer, gathers
the whole state on one rank to save it, sends each parameter by itself, and lets replicas drift apart where a
parameter is sliced (torch 2.13 over gloo). So this class uses torch's hooks around a step instead, and the
function by which DDP broadcasts its initial weights.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from lanewise.processes.device.nested import map_leaves
from lanewise.processes.world.shards import HeldTensor
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.part import share_out

logger = logging.getLogger(__name__)


@final
class OptimizerShards:
    """Lets each process update some of an optimizer's parameters. See [Note: whole parameters].

    Collective: every rank must construct it, and step the optimizer.

    Args:
        optimizer: an optimizer that is equal on all ranks, and took no step yet.
        model: the module with the parameters.
        world: the processes.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, world: World) -> None:
        self._world = world
        updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter in updated
        }
        num_bytes = {name: parameter.nbytes for name, parameter in named.items()}
        parts = share_out(num_bytes, world.world_size)
        self._parts = [[named[name] for name in part] for part in parts]
        self._others = {
            parameter for rank, part in enumerate(self._parts) if rank != world.rank for parameter in part
        }
        for parameter in self._others:
            optimizer.state.pop(parameter, None)  # Adagrad, for one, makes it before the first step
        self._groups: list[list[nn.Parameter]] = []
        self._num_open_steps = 0
        optimizer.register_step_pre_hook(self._take_own)
        optimizer.register_step_post_hook(self._exchange)
        if world.rank == 0:
            loads = [
                sum(num_bytes[name] for name in part) / max(1, sum(num_bytes.values())) for part in parts
            ]
            logger.info(
                "the optimizer's state is sharded: each process updates %.0f %% to %.0f %% of the parameters",
                100 * min(loads),
                100 * max(loads),
            )

    def updates(self, parameter: torch.Tensor) -> bool:
        """Tell whether this process updates a parameter, and so has the optimizer's state of it."""
        return parameter not in self._others

    def complete(self, taken: Mapping[str, Any]) -> dict[str, Any]:
        """Add the other ranks' states to a state that `take_optimizer` returned.

        Its tensors become `HeldTensor`s. Only their metadata is sent, not their values. What several
        ranks have, as the state that an optimizer made of a frozen parameter, is that of the first.

        Collective: every rank must call this.
        """
        local = {name: values for name, values in taken["state"].items() if values}
        state: dict[str, Any] = {}
        for rank, theirs in enumerate(self._world.all_gather_tree(map_leaves(_as_meta, local))):
            state = map_leaves(_as_held, local if rank == self._world.rank else theirs) | state
        return {**taken, "state": taken["state"] | state}

    @contextmanager
    def exchanging(self, optimizer: Optimizer) -> Iterator[None]:
        """Let each process change its parameters in the block, as in a step, and send them to the others.

        Collective: every rank must call this.
        """
        self._take_own(optimizer)
        yield
        self._exchange(optimizer)

    def _take_own(self, optimizer: Optimizer, *_: Any) -> None:
        """Before a step: remove the parameters of other processes from the optimizer's groups.

        This runs twice if a `step` calls the `step` of its base class, and torch calls the hooks for both.
        """
        self._num_open_steps += 1
        if self._num_open_steps > 1:
            return
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if self.updates(parameter)]

    def _exchange(self, optimizer: Optimizer, *_: Any) -> None:
        """After a step: put all parameters back into the optimizer's groups, and broadcast the updated ones.

        Collective: every rank must call this.
        """
        self._num_open_steps -= 1
        if self._num_open_steps:
            return
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for rank, part in enumerate(self._parts):
            self._world.broadcast([parameter.detach() for parameter in part], rank)


def _as_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _as_held(leaf: Any) -> Any:
    return HeldTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf
