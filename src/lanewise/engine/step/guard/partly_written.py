"""Names float buffers of which lanes write some elements each, so that their mean is of no use."""

import logging
from typing import final

import torch
from torch import nn

from lanewise.engine.buffers.buffers import StepState
from lanewise.engine.step.guard.changed_parameters import NORMALISATION
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.terms import LaneLoss
from lanewise.lanes import LaneTurn
from lanewise.processes.device.tensor_bytes import placed_checksum
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer

logger = logging.getLogger(__name__)


@final
class PartlyWritten(Look):
    """Looks in the first step at the float buffers after each lane, but for those of torch's normalisations.

    A queue, a codebook or a table by sample, of which each lane writes a part, would become a mean of
    what lanes wrote and what they left.

    Args:
        reducer: holds the model.
        world: the processes.
        step_state: the buffers that no lane may write.
    """

    def __init__(self, reducer: Reducer, world: World, step_state: StepState) -> None:
        self._replicas = reducer.replicas
        self._world = world
        self._left_out = {place.name for places in step_state for place in places}
        self._start: dict[str, torch.Tensor] = {}
        self._num_lanes = 0
        self._partly: set[str] = set()
        self._made: dict[str, set[int]] = {}
        """The checksums of what lanes made of each buffer."""

    def begin(self, turn: LaneTurn) -> None:
        """See `Look`."""
        self._num_lanes = 0
        self._start = {name: buffer.clone() for name, buffer in self._buffers(self._replicas[0]).items()}

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        """See `Look`."""
        replica = self._replicas[self._num_lanes % len(self._replicas)]
        self._num_lanes += 1
        if not turn.positions:
            return
        for name, buffer in self._buffers(replica).items():
            start = self._start.get(name)
            if start is None or start.shape != buffer.shape:
                continue
            is_written = buffer.to(start.device) != start
            if is_written.any() and not is_written.all():
                self._partly.add(name)
            self._made.setdefault(name, set()).add(int(placed_checksum(buffer)))

    def finish(self, totals: StepTotals) -> bool:
        """See `Look`. Collective."""
        self._start = {}
        made = {name: sorted(sums) for name, sums in self._made.items()}
        told = self._world.all_gather_tree((sorted(self._partly), made))
        for name in sorted({name for partly, _ in told for name in partly}):
            if self._world.rank == 0 and len({total for _, sums in told for total in sums.get(name, ())}) > 1:
                logger.warning(
                    "lanes wrote different elements of the buffer %s and left others. After the step it is "
                    "the mean over the lanes, which suits running statistics, and no queue, codebook or "
                    "table: write such a buffer in after_update, from what the lanes gather (docs/state.md).",
                    name,
                )
        return True

    def _buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.{key}" if prefix else key: buffer
            for prefix, module in model.named_modules()
            if not isinstance(module, NORMALISATION)
            for key, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and buffer.layout is torch.strided
            if (f"{prefix}.{key}" if prefix else key) not in self._left_out
        }
