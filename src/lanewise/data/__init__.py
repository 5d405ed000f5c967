"""From a map-style dataset to the micro-batches of given lanes; knows nothing of ranks."""

from lanewise.data.digest import digest, opaque_types
from lanewise.data.file_dataset import FileDataset
from lanewise.data.fingerprint import Fingerprint, fingerprint
from lanewise.data.loader import LaneLoader, read_turns
from lanewise.data.reader import LaneBatch, LaneReader

__all__ = [
    "FileDataset",
    "Fingerprint",
    "LaneBatch",
    "LaneLoader",
    "LaneReader",
    "digest",
    "fingerprint",
    "opaque_types",
    "read_turns",
]
