"""Writes what every lane was given in every step: the sample indices, and a hash of the tensors."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from lanewise.data import LaneBatch, digest
from lanewise.data.stream_loader import upcoming_of
from lanewise.processes.device.nested import map_leaves
from lanewise.runs.cut import cut, cut_ranks
from lanewise.runs.file import JsonLines, replacing


@final
class AuditLog:
    """The audit of one rank: a line for each lane that it carries in a step, and on rank 0 what was planned.

    audit/
        plan.jsonl          from which step on which samples were due: a line for each start of the run
        plan-000001.npz     what the order was made from besides, such as the lengths of the samples
        rank-00000.jsonl    what the lanes of a rank were given; a killed run keeps its lines

    Args:
        folder: the folder of the audit.
        rank: the number of this process.
        world_size: processes of the run; what ranks beyond it wrote earlier is cut by rank 0.
        after_step: lines of later steps are cut off, as a run that goes on writes them again.
        plan: what determines the samples of a step; of a stream, which has no such plan, how it is cut.
        tables: what the order was made from besides, by name.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        after_step: int,
        plan: Mapping[str, Any],
        tables: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        self._path = cut_ranks(folder, rank, world_size, after_step)
        self._num_lanes = plan.get("num_lanes")
        """The lanes of a stream; None where the plan tells what is due."""
        plans = folder / "plan.jsonl"
        if rank == 0:
            cut(plans, after_step)
            if tables:
                path = folder / f"plan-{after_step + 1:06d}.npz"
                with replacing(path) as new, new.open("wb") as file_of_tables:
                    np.savez(file_of_tables, **dict(tables))  # type: ignore[arg-type]  # names are not its own
            with closing(JsonLines(plans)) as lines:
                lines.write({"step": after_step + 1, **plan})

    def record(self, batches: Iterator[LaneBatch]) -> Generator[LaneBatch, None, None]:
        """Yield the batches, each written down first; on a GPU this waits for its copy."""
        with closing(JsonLines(self._path)) as lines:
            for batch in batches:
                if batch.turn.positions:
                    columns = {
                        "step": batch.turn.step + 1,
                        "lane": batch.turn.lane,
                        "indices": list(batch.indices),
                        "tensors": digest(batch.own_data),
                        "rows": _num_rows(batch.own_data),
                        "skipped": len(batch.indices) - batch.num_samples,
                    }
                    lines.write(columns if self._num_lanes is None else columns | self._of_stream(batch))
                yield batch

    def _of_stream(self, batch: LaneBatch) -> dict[str, Any]:
        """Return what only the batches of a stream tell: their epoch, and which lanes have samples.

        Of the step the lanes that are present, unless all are; of the next one, in the last line of a rank,
        how many samples each of its lanes has.
        """
        present = batch.turn.present
        columns: dict[str, Any] = {"epoch": batch.turn.epoch + 1}
        if len(present) != self._num_lanes:
            columns["present"] = list(present)
        if batch.to_source is not None:
            columns["upcoming"] = upcoming_of(batch.to_source.numbers)
        return columns


def _num_rows(data: Any) -> int | None:
    """Return the first dimension that all tensors of a batch have in common; None if there is no such."""
    sizes = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            sizes.add(leaf.shape[0])
        return leaf

    map_leaves(note, data)
    return sizes.pop() if len(sizes) == 1 else None
