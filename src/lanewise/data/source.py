"""What gives each step its batches: an order of samples, or a stream."""

from typing import TypeAlias

from lanewise.data.lane_reader import LaneReader
from lanewise.data.loader import LaneLoader
from lanewise.data.stream import StreamReader
from lanewise.data.stream_loader import StreamLoader

LaneSource: TypeAlias = LaneLoader | StreamLoader
"""Gives a process the micro-batches of its lanes, step by step and over all epochs."""

SourceReader: TypeAlias = LaneReader | StreamReader
"""Reads the dataset of a source."""
