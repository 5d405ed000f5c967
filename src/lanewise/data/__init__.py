"""From a map-style dataset to the micro-batches of given lanes; knows nothing of ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lanewise.data.digest import digest as digest
from lanewise.data.digest import opaque_types as opaque_types
from lanewise.data.file_dataset import FileDataset as FileDataset
from lanewise.data.fingerprint import Fingerprint as Fingerprint
from lanewise.data.fingerprint import fingerprint as fingerprint
from lanewise.data.loader import LaneLoader as LaneLoader
from lanewise.data.loader import read_turns as read_turns
from lanewise.data.reader import LaneBatch as LaneBatch
from lanewise.data.reader import LaneReader as LaneReader
from lanewise.data.rows import Rows as Rows
from lanewise.data.sequences import Packed as Packed
from lanewise.data.sequences import Padded as Padded
from lanewise.data.sequences import Ragged as Ragged
from lanewise.data.sequences import pack as pack
from lanewise.data.sequences import pad as pad

if TYPE_CHECKING:
    from lanewise.data.json_lines import JsonLinesDataset as JsonLinesDataset
    from lanewise.data.parquet import ParquetDataset as ParquetDataset
    from lanewise.data.text import TextDataset as TextDataset
    from lanewise.data.tokens import TokenDataset as TokenDataset

_MODULES = {
    "JsonLinesDataset": "lanewise.data.json_lines",
    "ParquetDataset": "lanewise.data.parquet",
    "TextDataset": "lanewise.data.text",
    "TokenDataset": "lanewise.data.tokens",
}


def __getattr__(name: str) -> Any:
    """Import a dataset of files when it is first used: few programs need one, and its imports take time."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
