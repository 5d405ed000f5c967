"""Streams of Hugging Face and mixtures train the same model on any number of processes, and in parts."""

import json
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from lanewise.config import RunConfig
from tests.distributed.stream_parts import train_whole_and_in_parts, two_epochs

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="not installed: datasets")

KINDS = {
    "json": 2 * 33,
    "parquet": 2 * 33,
    "plain": 2 * 7,
    "shuffled": 2 * 33,
    "mixed": None,
    "mixed_plain": None,
}
"""How many samples two epochs have."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Six files of each kind, with 3 to 8 rows."""
    folder = tmp_path_factory.mktemp("files")
    for shard in range(6):
        rows = [{"x": float(10 * shard + row)} for row in range(3 + shard)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{shard}.json").write_text(lines)
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{shard}.parquet", row_group_size=2)
    return folder


def config_for(kind: str, files: Path) -> RunConfig:
    return two_epochs("tests.distributed.streamed.Streamed", folder=str(files), kind=kind)


@pytest.mark.timeout(120)
def test_the_same_on_one_process_and_on_two_and_one_in_parts(files):
    configs = {kind: config_for(kind, files) for kind in KINDS}
    for kind, (whole, in_parts) in train_whole_and_in_parts(configs).items():
        assert whole == in_parts, kind
        assert KINDS[kind] in {None, whole[1]}
