"""Names float buffers of which lanes write some elements each, so that their mean is of no use."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lanewise.engine.buffers.pack import BufferPack
from lanewise.processes.device.tensor_bytes import placed_checksum
from lanewise.processes.world.world import World

logger = logging.getLogger(__name__)

NORMALISATION = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def name_partly_written(
    packs: Sequence[BufferPack], lanes: Sequence[Mapping[int, torch.Tensor]], world: World
) -> None:
    """Warn of buffers of which lanes wrote other elements each, but for those of torch's normalisations.

    A queue, a codebook or a table by sample becomes a mean of what lanes wrote and what they left.

    Collective: every rank must call this.

    Args:
        packs: all packs, as they were at the start of the step.
        lanes: for each lane of this process, the values of the packs that some lane changed, by number.
        world: the processes.
    """
    partly: set[str] = set()
    made: dict[str, set[int]] = {}
    for number, values in (item for of_lane in lanes for item in of_lane.items()):
        pack = packs[number]
        if pack.start is not None and pack.kind[1].is_floating_point:
            for place, start, value in zip(
                pack.places, pack.split(pack.start), pack.split(values), strict=True
            ):
                if not isinstance(place.module, NORMALISATION):
                    is_written = value != start.to(value.device)
                    if is_written.any() and not is_written.all():
                        partly.add(place.name)
                    made.setdefault(place.name, set()).add(int(placed_checksum(value)))
    told = world.all_gather_tree((sorted(partly), {name: sorted(sums) for name, sums in made.items()}))
    for name in sorted({name for partly, _ in told for name in partly}):
        if world.rank == 0 and len({total for _, sums in told for total in sums.get(name, ())}) > 1:
            logger.warning(
                "lanes wrote different elements of the buffer %s and left others. After the step it is "
                "the mean over the lanes, which suits running statistics, and no queue, codebook or "
                "table: write such a buffer in after_update, from what the lanes gather (docs/losses.md).",
                name,
            )
