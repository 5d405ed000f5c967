"""From a map-style dataset to the micro-batches of given lanes; knows nothing of ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lanewise.data.digest import digest, opaque_types
from lanewise.data.file_dataset import FileDataset
from lanewise.data.fingerprint import Fingerprint, fingerprint
from lanewise.data.loader import LaneLoader, read_turns
from lanewise.data.reader import LaneBatch, LaneReader
from lanewise.data.rows import Rows
from lanewise.data.sequences import Packed, Padded, Ragged, pack, pad

if TYPE_CHECKING:
    from lanewise.data.json_lines import JsonLinesDataset
    from lanewise.data.parquet import ParquetDataset
    from lanewise.data.text import TextDataset
    from lanewise.data.tokens import TokenDataset

__all__ = [
    "FileDataset",
    "Fingerprint",
    "JsonLinesDataset",
    "LaneBatch",
    "LaneLoader",
    "LaneReader",
    "Packed",
    "Padded",
    "ParquetDataset",
    "Ragged",
    "Rows",
    "TextDataset",
    "TokenDataset",
    "digest",
    "fingerprint",
    "opaque_types",
    "pack",
    "pad",
    "read_turns",
]

_MODULES = {
    "JsonLinesDataset": "lanewise.data.json_lines",
    "ParquetDataset": "lanewise.data.parquet",
    "TextDataset": "lanewise.data.text",
    "TokenDataset": "lanewise.data.tokens",
}


def __getattr__(name: str) -> Any:
    """Import a dataset of files when it is first used: few programs need it, and all wait for its imports."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
