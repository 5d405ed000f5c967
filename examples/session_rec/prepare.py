"""Makes Parquet of a click log: `python prepare.py msweb|csv SOURCE FOLDER`."""

import argparse
import csv
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

from sessions import Session, write_sessions

from lanewise.errors import DataError

PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""


def read_msweb(path: Path) -> tuple[list[str], list[Session]]:
    """Read one file of the Anonymous Microsoft Web Data: the areas of the site, and who visited which.

    Of the lines, `A,1287,1,"title","/url"` names an area, `C,"10001",10001` begins a user, and `V,1000,1` is
    a visit of that user. Each user is a session, of the visits in the order of the file.

    Raises:
        DataError: if it cannot be read, or has another format.
    """
    areas: list[str] = []
    sessions: list[Session] = []
    visited: list[str] = []
    for number, fields in _lines(path):
        kind = fields[0] if fields else ""
        if len(fields) < 2 or kind not in {*"AVC", *"INT"} or (kind == "V" and not sessions):
            raise DataError(f"{path}:{number} is no line of this format: {fields!r:.80}.")
        if kind == "A":
            areas.append(fields[1])
        elif kind == "C":
            visited = []
            sessions.append((fields[1], visited))
        elif kind == "V":
            visited.append(fields[1])
    return areas, sessions


def read_csv(path: Path) -> list[Session]:
    """Read a log with the columns session, time and item, in any order of columns and lines.

    A time is a number or a date in ISO format. Clicks of one time stay in the order of the file.

    Returns:
        The sessions, ordered by when they begin.

    Raises:
        DataError: if it cannot be read, lacks a column, or a line has no such time or an empty field.
    """
    lines = _lines(path)
    _, header = next(lines, (1, []))
    missing = [name for name in ("session", "time", "item") if name not in header]
    if missing:
        raise DataError(
            f"{path} has no column {' and none '.join(missing)}; its first line is {','.join(header)!r:.80}. "
            "The first line must name the columns session, time and item."
        )
    columns = [header.index(name) for name in ("session", "time", "item")]
    clicks: dict[str, list[tuple[float, int, str]]] = {}
    for number, fields in lines:
        if not fields:
            continue
        if len(fields) != len(header):
            raise DataError(f"{path}:{number} has {len(fields)} fields, and the first line {len(header)}.")
        session, time, item = (fields[column] for column in columns)
        seconds = _seconds(time)
        if seconds is None or not session or not item:
            raise DataError(
                f"{path}:{number}: got session {session!r}, time {time!r} and item {item!r}. None may be "
                "empty, and a time is a number or a date such as 2026-03-01T12:30:00."
            )
        clicks.setdefault(session, []).append((seconds, number, item))
    in_order = sorted((sorted(of_session), session) for session, of_session in clicks.items())
    return [(session, [item for *_, item in of_session]) for of_session, session in in_order]


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each line, with its number."""
    try:
        with path.open("rb") as start:
            if start.read(len(PARQUET)) == PARQUET:
                raise DataError(
                    f"{path} is Parquet, which needs no preparing: a task reads its columns by "
                    "lanewise.data.ParquetDataset, as docs/coming_from/transformers4rec.md shows."
                )
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            for fields in reader:
                yield reader.line_num, fields
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as comma-separated text: {error}.") from error


def _seconds(text: str) -> float | None:
    """Return a time as a number; a date without a zone is taken as one in UTC."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            return None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    return seconds if isfinite(seconds) else None


def prepare_msweb(source: Path, folder: Path) -> None:
    """Make Parquet of the folder of the Anonymous Microsoft Web Data, which has its test users in a file."""
    items, train = read_msweb(source / "anonymous-msweb.data")
    test_items, held_out = read_msweb(source / "anonymous-msweb.test")
    write_sessions(folder, sorted({*items, *test_items}), {"train": train, "held_out": held_out})


def prepare_csv(source: Path, folder: Path, share: float = 0.1) -> None:
    """Make Parquet of a CSV; the sessions that begin last are held out, so that the future is predicted.

    Args:
        source: the CSV.
        folder: what is made.
        share: of the sessions with two items or more, how many are held out.

    Raises:
        DataError: if there is nothing to train on, or nothing to hold out.
    """
    if not 0 < share < 1:
        raise DataError(f"--held-out must be a share between 0 and 1, such as 0.1: got {share}.")
    sessions = [session for session in read_csv(source) if len(session[1]) > 1]
    num_train = len(sessions) - round(len(sessions) * share)
    items = sorted({item for _, visited in sessions for item in visited})
    write_sessions(folder, items, {"train": sessions[:num_train], "held_out": sessions[num_train:]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=["msweb", "csv"])
    parser.add_argument("source", type=Path, help="the folder of msweb, or a CSV of session, time, item")
    parser.add_argument("folder", type=Path, help="what is made; it may not be there yet")
    parser.add_argument(
        "--held-out", type=float, default=0.1, help="of a CSV: share of the sessions, those that begin last"
    )
    given = parser.parse_args()
    try:
        if given.format == "msweb":
            prepare_msweb(given.source, given.folder)
        else:
            prepare_csv(given.source, given.folder, given.held_out)
    except DataError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
