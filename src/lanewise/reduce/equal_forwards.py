"""Where a forward is collective: how many each process runs, and how its backward reaches what it ran."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, final

import torch

from lanewise.data import LaneBatch
from lanewise.errors import DataError
from lanewise.processes.world.world import World
from lanewise.reduce.reducer import Lane


def equal_forwards(lanes: Iterator[Lane], num_lanes: int | None, world: World) -> Iterator[Lane | None]:
    """Yield the lanes, and None for each forward that others run without this process.

    Where nobody knows how many there are, all tell each other before each forward whether they go on.

    Collective: every rank must iterate to the end.

    Args:
        lanes: of this process; a lane without positions is yielded, and runs no forward.
        num_lanes: the number of these lanes that have positions; None on every rank: nobody knows it.
        world: the processes.
    """
    if num_lanes is not None:
        num_missing = max(world.all_gather_tree(num_lanes)) - num_lanes
        yield from lanes
        yield from repeat(None, num_missing)
        return
    while True:
        lane = next(lanes, None)
        if lane is not None and not lane.batch.turn.positions:
            yield lane
            continue
        goes_on = torch.tensor([lane is not None], dtype=torch.uint8, device=world.device)
        if not world.start_all_gather_to_host(goes_on)().any():
            return
        yield lane


def require_data(batch: LaneBatch) -> None:
    """Raise DataError if the samples of a lane are lost: others wait for its forward."""
    turn = batch.turn
    if not batch.has_samples and batch.data is None:
        number = turn.lane if turn.positions else 0
        raise DataError(
            f"none of the samples of lane {number} in step {turn.step + 1} can be read, nor any of the first "
            "ones of the dataset, and under fsdp each lane needs some for its forward. Mend the files, or "
            "use another distributed.reducer."
        )


def connect(loss_sum: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss with every tensor as an input.

    A tensor that the loss did not use gets an undefined gradient through this node, at no cost.

    Args:
        loss_sum: the lane's loss; None: the result is a loss that gives no gradient to any tensor.
        tensors: the tensors to connect.
    """
    if loss_sum is None:
        loss_sum = tensors[0].new_zeros(())
    connected: torch.Tensor = _Connect.apply(loss_sum, *tensors)  # type: ignore[no-untyped-call]
    return connected


@final
class _Connect(torch.autograd.Function):
    """The identity on its first argument; the others receive undefined gradients."""

    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.num_tensors = len(tensors)
        return loss_sum.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (gradients[0], *[None] * ctx.num_tensors)
