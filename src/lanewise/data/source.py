"""What gives each step its batches: an order of samples, or a stream."""

from dataclasses import replace
from typing import Any, TypeAlias

from lanewise.data.lane_reader import LaneReader
from lanewise.data.loader import LaneLoader
from lanewise.data.stream import StreamReader
from lanewise.data.stream_loader import StreamLoader

LaneSource: TypeAlias = LaneLoader | StreamLoader
"""Gives a process the micro-batches of its lanes, step by step and over all epochs."""

SourceReader: TypeAlias = LaneReader | StreamReader
"""Reads the dataset of a source."""


def with_reader(source: LaneSource, **fields: Any) -> LaneSource:
    """Return a source of which nothing was read yet, with other values of some fields of its reader."""
    reader: Any = replace(source.reader, **fields)
    return replace(source, reader=reader)
