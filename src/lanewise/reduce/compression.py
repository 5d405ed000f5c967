"""Sums gradients that travel compressed over processes, through torch's own communication hooks for DDP.

Results are approximate, and depend on the number of processes. See docs/numerics.md.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from lanewise.config import CompressionName
from lanewise.errors import TaskError
from lanewise.world.world import World

logger = logging.getLogger(__name__)

_Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""Of torch's: from its state and a bucket to a future of the mean over processes, in the bucket's buffer."""

_NUM_WHOLE_STEPS = 1000
"""Steps before PowerSGD begins, as in torch: it does harm while gradients change fast."""
_SMALLEST_NORM = 1e-8
"""What PowerSGD adds to norms by which it divides: a parameter that no lane uses has a gradient of zeros."""
_LARGEST_EXPONENT = 15
"""Of the numbers that are cast to fp16, which ends below 2^16."""


@final
class CompressedAllReduce:
    """Sums DDP's buckets over processes, in fewer bytes than they have.

    Collective: every rank must construct it, and call `start` for the same buckets.

    Args:
        model: the user's module.
        world: the processes; more than one.
        compression: how gradients travel.

    Raises:
        TaskError: if a parameter of the model cannot be compressed.
    """

    def __init__(self, model: nn.Module, world: World, compression: CompressionName) -> None:
        # Late, since every program with a loop of its own would wait for what few need.
        from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415
            default_hooks,
            powerSGD_hook,
        )

        _require_compressible(model, compression)
        self._world_size = world.world_size
        self._state: powerSGD_hook.PowerSGDState | None = None
        self._hook: _Hook = default_hooks.bf16_compress_hook
        self._is_scaled = compression == "fp16"
        if self._is_scaled:
            self._hook = default_hooks.fp16_compress_hook
        self._factors: dict[int, torch.Tensor] = {}
        # Its collectives begin in callbacks: on gloo two buckets at once would wait for each other forever.
        self._takes_turns = compression == "powersgd" and dist.get_backend() == "gloo"
        if compression == "powersgd":
            self._hook = powerSGD_hook.powerSGD_hook
            self._state = powerSGD_hook.PowerSGDState(
                None, start_powerSGD_iter=_NUM_WHOLE_STEPS, orthogonalization_epsilon=_SMALLEST_NORM
            )
        if world.rank == 0:
            logger.info(
                "gradients travel compressed (%s): results are approximate, and depend on the layout",
                compression,
            )
            if compression == "powersgd":
                logger.info(
                    "PowerSGD begins after %d steps from here; its memory of what it left out starts empty: "
                    "no checkpoint holds it",
                    _NUM_WHOLE_STEPS,
                )

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum a bucket of gradients.

        Returns:
            A future of the sum over all processes.
        """
        factor: float | torch.Tensor = self._world_size  # the hooks make means
        if self._is_scaled:
            scale = _scale_for_fp16(bucket.buffer())
            bucket.buffer().mul_(scale)
            # Kept until the bucket comes again: a GPU may still need it when the callback has returned.
            factor = self._factors[bucket.index()] = self._world_size / scale
        future = self._hook(self._state, bucket)
        if self._takes_turns:
            future.wait()
        summed: torch.futures.Future[torch.Tensor] = future.then(lambda mean: mean.value().mul_(factor))
        return summed


def _scale_for_fp16(flat: torch.Tensor) -> torch.Tensor:
    """Return the power of two that brings the largest element of all ranks' tensors to the end of fp16.

    Sums over samples or tokens would overflow, and small gradients be lost. Collective: every rank must call
    this.
    """
    largest = torch.linalg.vector_norm(flat, math.inf).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponent = _LARGEST_EXPONENT - torch.frexp(largest).exponent
    return torch.exp2(exponent.clamp(-100, 100))


def _require_compressible(model: nn.Module, compression: CompressionName) -> None:
    """Raise TaskError where torch's hooks do not take a parameter."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.is_complex() or not parameter.numel():
            what = "is complex" if parameter.is_complex() else "has no elements"
            raise TaskError(
                f"parameter {name} {what}, which distributed.compression does not take. "
                "Leave compression out, or the parameter."
            )
        if compression == "powersgd" and not parameter.dim():
            raise TaskError(
                f"parameter {name} is a scalar, which distributed.compression powersgd does not take. "
                "Give it the shape (1,), or use compression=bf16."
            )
