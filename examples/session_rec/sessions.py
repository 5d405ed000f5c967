"""A folder of sessions in Parquet: how it is written and read, and generated ones for a first run."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lanewise.data import ParquetDataset
from lanewise.errors import DataError

SCHEMA = pa.schema([("session", pa.string()), ("items", pa.list_(pa.int32())), ("length", pa.int32())])
"""Items are numbered from 1, so that 0 is free for padding."""

Session = tuple[str, Sequence[str]]
"""A name, and the names of the items in their order."""


def load_sessions(folder: Path, part: str, column: str = "items") -> ParquetDataset:
    """Return the sessions of a part, `train` or `held_out`."""
    return ParquetDataset(str(folder / part / "*.parquet"), columns=[column])


def read_items(folder: Path) -> list[str]:
    """Return the names of the items; the first one has number 1.

    Raises:
        DataError: if this is no folder of sessions.
    """
    try:
        items: list[str] = json.loads((folder / "items.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} is no folder of sessions: its items.json cannot be read ({error}). "
            "Make one with examples/session_rec/prepare.py."
        ) from error
    return items


def write_sessions(
    folder: Path, items: Sequence[str], parts: dict[str, Sequence[Session]], rows_per_group: int = 1000
) -> None:
    """Write sessions of two items or more as Parquet. The folder is there as a whole or not at all.

    Args:
        folder: what is made; it may not be there yet.
        items: the names of all items, each once.
        parts: the sessions of `train` and `held_out`.
        rows_per_group: the mean size of a row group. As in most logs, no two neighbours are of one size.

    Raises:
        DataError: if the folder is there already, or a part has no session of two items.
    """
    if folder.exists():
        raise DataError(f"{folder} is there already. Remove it, or give another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        number_of = {item: number for number, item in enumerate(items, start=1)}
        for name, sessions in parts.items():
            rows = [
                (session, [number_of[item] for item in visited], len(visited))
                for session, visited in sessions
                if len(visited) > 1
            ]
            if not rows:
                raise DataError(f"No session of {name} has two items, so there is no next item to predict.")
            (unfinished / name).mkdir()
            for number, groups in enumerate(_files(rows, rows_per_group)):
                with pq.ParquetWriter(unfinished / name / f"{number:03}.parquet", SCHEMA) as writer:
                    for group in groups:
                        columns = [list(column) for column in zip(*group, strict=True)]
                        writer.write_table(pa.table(columns, SCHEMA), row_group_size=len(group))
        (unfinished / "items.json").write_text(json.dumps(list(items)), encoding="utf-8")
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


Row = tuple[str, list[int], int]


def _files(rows: list[Row], rows_per_group: int) -> Iterator[list[list[Row]]]:
    """Cut rows into row groups of unequal sizes, and these into files of one to three of them."""
    sizes = cycle(max(1, rows_per_group * share // 10) for share in (10, 3, 17, 6, 14))
    num_groups = cycle((2, 1, 3))
    start = 0
    while start < len(rows):
        groups = []
        for _ in range(next(num_groups)):
            size = next(sizes)
            groups.append(rows[start : start + size])
            start += size
        yield [group for group in groups if group]


def generated_sessions() -> Path:
    """Return a folder of generated sessions in the user's cache; the first process that needs it makes it.

    They are no one's clicks. Each session has one of eight topics; an item is followed by its own successor,
    by the successor of the item before it, or by an item of the topic, and none comes twice.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lanewise" / "session_rec-generated-1"
    if not folder.exists():
        draw = random.Random(0)
        sessions = [(f"generated {number}", _generate(draw)) for number in range(3600)]
        items = [_name(item) for item in range(NUM_ITEMS)]
        try:
            write_sessions(folder, items, {"train": sessions[:3000], "held_out": sessions[3000:]}, 200)
        except (OSError, DataError):
            if not folder.exists():  # another process was faster
                raise
    return folder


NUM_ITEMS, NUM_TOPICS = 120, 8


def _generate(draw: random.Random) -> list[str]:
    topic = draw.randrange(NUM_TOPICS)
    visited: list[int] = []
    for _ in range(draw.randint(1, 12)):
        followed = draw.choices(visited[-2:], k=1) if visited and draw.random() < 0.6 else []
        item = (
            (followed[0] * 7 + 3) % NUM_ITEMS
            if followed
            else int(draw.random() ** 2 * (NUM_ITEMS // NUM_TOPICS)) * NUM_TOPICS + topic
        )
        if item not in visited:
            visited.append(item)
    return [_name(item) for item in visited]


def _name(item: int) -> str:
    return f"generated item {item}"
