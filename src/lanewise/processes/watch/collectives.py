"""What the last collectives of each rank were, from torch's flight recorder.

Torch records them for gloo and nccl by itself. The record is read as JSON; torch's other form is a pickle.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lanewise.processes.watch.channel import named_ranks


def last_collectives() -> list[dict[str, Any]]:
    """Return the newest collective of each process group of this process; empty where torch records none."""
    import torch  # noqa: PLC0415 - a launcher loads it when it launches

    with suppress(AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return read_record(torch._C._distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]  # noqa: SLF001
    return []


def read_record(record: bytes | str) -> list[dict[str, Any]]:
    """Return the newest collective of each process group in a record.

    Raises:
        ValueError: if it is no JSON.
    """
    newest: dict[str, dict[str, Any]] = {}
    for entry in json.loads(record).get("entries", []):
        group = " ".join(map(str, entry["process_group"]))
        newest[group] = {
            "group": group,
            "number": entry["collective_seq_id"],
            "name": entry["profiling_name"],
            "sizes": entry["input_sizes"],
            "state": entry["state"],
        }
    return list(newest.values())


def differing(of_ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Write for each process group whose ranks are at different collectives which rank is where."""
    groups: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, newest in sorted(of_ranks.items()):
        for collective in newest:
            what = f"number {collective['number']}, {collective['name']} of {collective['sizes']}"
            groups[collective["group"]][what].append(rank)
    return [
        f"collectives of group {group}: "
        + "; ".join(f"{named_ranks(ranks)} came last to {what}" for what, ranks in at.items())
        for group, at in groups.items()
        if len(at) > 1
    ]
