"""Sums compressed gradients over processes, through torch's own communication hooks for DDP.

Results are approximate, and depend on the number of processes. See docs/numerics.md.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from lanewise.config import CompressionName
from lanewise.errors import TaskError
from lanewise.processes.world.world import World

logger = logging.getLogger(__name__)

_Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
"""A hook of torch: from its state, here None, and a bucket to a future of the mean over processes, in the
bucket's buffer."""

_LARGEST_EXPONENT = 15
"""The largest exponent of numbers that are cast to fp16, whose range ends below 2^16."""


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
        # A late import: it is slow, and few programs need it.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415

        _require_compressible(model)
        self._world_size = world.world_size
        self._is_scaled = compression == "fp16"
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        self._hook: _Hook = hooks[compression]
        self._factors: dict[int, torch.Tensor] = {}
        if world.rank == 0:
            logger.info(
                "gradients are sent compressed (%s): results are approximate and depend on world size",
                compression,
            )

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum a bucket of gradients.

        Returns:
            A future of the sum over all processes.
        """
        factor: float | torch.Tensor = self._world_size  # the hooks return means
        if self._is_scaled:
            scale = _scale_for_fp16(bucket.buffer())
            bucket.buffer().mul_(scale)
            # Kept until the next step's bucket: a GPU may still need it after the callback has returned.
            factor = self._factors[bucket.index()] = self._world_size / scale
        future = self._hook(None, bucket)
        summed: torch.futures.Future[torch.Tensor] = future.then(lambda mean: mean.value().mul_(factor))
        return summed


def _scale_for_fp16(flat: torch.Tensor) -> torch.Tensor:
    """Return the power of two that scales the largest element of all ranks to the end of fp16's range.

    Unscaled, sums over samples or tokens could overflow, and small gradients could become zero.

    Collective: every rank must call this.
    """
    largest = torch.linalg.vector_norm(flat, math.inf).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponent = _LARGEST_EXPONENT - torch.frexp(largest).exponent
    return torch.exp2(exponent.clamp(-100, 100))


def _require_compressible(model: nn.Module) -> None:
    """Raise TaskError if torch's hooks do not support a parameter."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.is_complex() or not parameter.numel():
            what = "is complex" if parameter.is_complex() else "has no elements"
            raise TaskError(
                f"parameter {name} {what}, which distributed.compression does not support. "
                "Leave out the compression, or the parameter."
            )
