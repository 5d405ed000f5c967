"""From a map-style dataset to the micro-batches of given lanes; knows nothing of ranks."""

from lanewise.data.digest import digest, opaque_types
from lanewise.data.file_dataset import FileDataset
from lanewise.data.fingerprint import Fingerprint, fingerprint
from lanewise.data.loader import LaneLoader, read_turns
from lanewise.data.parquet import ParquetDataset
from lanewise.data.ragged import Ragged
from lanewise.data.reader import LaneBatch, LaneReader
from lanewise.data.rows import Rows

__all__ = [
    "FileDataset",
    "Fingerprint",
    "LaneBatch",
    "LaneLoader",
    "LaneReader",
    "ParquetDataset",
    "Ragged",
    "Rows",
    "digest",
    "fingerprint",
    "opaque_types",
    "read_turns",
]
