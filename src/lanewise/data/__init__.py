"""From a dataset to the micro-batches of given lanes; knows nothing of ranks.

A new format of files is a `FileDataset` in a file here, and a line in `_MODULES`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lanewise.data.digest import digest as digest
from lanewise.data.digest import opaque_types as opaque_types
from lanewise.data.file_dataset import FileDataset as FileDataset
from lanewise.data.fingerprint import Fingerprint as Fingerprint
from lanewise.data.fingerprint import fingerprint as fingerprint
from lanewise.data.lane_reader import LaneBatch as LaneBatch
from lanewise.data.lane_reader import LaneReader as LaneReader
from lanewise.data.lane_stream import LaneStream as LaneStream
from lanewise.data.lane_stream import draws_in_threads as draws_in_threads
from lanewise.data.lane_stream import is_stream as is_stream
from lanewise.data.lane_stream import shuffles_itself as shuffles_itself
from lanewise.data.loader import LaneLoader as LaneLoader
from lanewise.data.loader import StepEnd as StepEnd
from lanewise.data.rows import Rows as Rows
from lanewise.data.sequences import Packed as Packed
from lanewise.data.sequences import Padded as Padded
from lanewise.data.sequences import Ragged as Ragged
from lanewise.data.sequences import pack as pack
from lanewise.data.sequences import pad as pad
from lanewise.data.source import LaneSource as LaneSource
from lanewise.data.stream import StreamCut as StreamCut
from lanewise.data.stream import StreamReader as StreamReader
from lanewise.data.stream_loader import StreamLoader as StreamLoader
from lanewise.data.stream_pass import read_first as read_first
from lanewise.data.stream_pass import read_to_end as read_to_end
from lanewise.data.workers import read_turns as read_turns

if TYPE_CHECKING:
    from lanewise.data.json_lines import JsonLinesDataset as JsonLinesDataset
    from lanewise.data.mixed_stream import MixedStream as MixedStream
    from lanewise.data.parquet import ParquetDataset as ParquetDataset
    from lanewise.data.text import TextDataset as TextDataset
    from lanewise.data.tokens import TokenDataset as TokenDataset

_MODULES = {
    "JsonLinesDataset": "lanewise.data.json_lines",
    "MixedStream": "lanewise.data.mixed_stream",
    "ParquetDataset": "lanewise.data.parquet",
    "TextDataset": "lanewise.data.text",
    "TokenDataset": "lanewise.data.tokens",
}


def __getattr__(name: str) -> Any:
    """Import what few programs need when it is first used: its imports take time."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
