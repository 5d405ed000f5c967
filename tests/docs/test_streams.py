"""The streams of docs/data.md train the same on one process, and on two and one in parts."""

import gzip
import importlib.util
import io
import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
import torch
import yaml
from pyarrow import parquet
from torch import nn
from torch.nn import functional as F

from lanewise import Task
from lanewise.config import DataConfig
from tests.distributed.stream_parts import train_whole_and_in_parts, two_epochs

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
STREAMS = PAGE.read_text().partition("\n## Streams\n")[2]
CODE, YAML = (
    "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", STREAMS, flags=re.DOTALL | re.MULTILINE))
    for language in ("python", "yaml")
)


def page(folder: str) -> ModuleType:
    """Return the module that all programs of the page make."""
    path = Path(folder) / "page.py"
    spec = importlib.util.spec_from_file_location("page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reads(Task):
    """Regression on one of the streams of the page."""

    def __init__(self, folder: str, stream: str) -> None:
        self.folder = folder
        self.stream = stream

    def train_dataset(self) -> Any:
        code, at = page(self.folder), self.folder
        if self.stream == "mixture":
            code.Logs, code.Archive = self._at(code.Logs), self._at(code.Archive)
            return code.mixture()
        makes = {
            "logs": lambda: code.Logs(f"{at}/logs"),
            "archive": lambda: code.Archive(f"{at}/archive.jsonl.gz"),
            "reviews": lambda: code.reviews(f"{at}/reviews"),
            "tar": lambda: code.TarShards(f"{at}/tar"),
            "few_tar": lambda: code.TarShards(f"{at}/few_tar"),
        }
        return makes[self.stream]()

    def _at(self, made: Any) -> Any:
        return lambda path: made(f"{self.folder}/{path}")

    def collate(self, samples: Any) -> Any:
        if self.stream.endswith("tar"):
            assert all(sample["txt"] == b"text" for sample in samples)
            samples = [json.loads(sample["json"]) for sample in samples]
        inputs = torch.tensor([[float(sample["x"])] for sample in samples])
        return inputs / 60, 2 * inputs / 60

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Five files of each kind with 2 to 6 samples, two of tar for few lanes, and an archive of 7."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "page.py").write_text(CODE)
    for name in ("logs", "reviews", "tar", "few_tar"):
        (folder / name).mkdir()
    for shard in range(5):
        rows = [{"x": 10 * shard + number} for number in range(2 + shard)]
        (folder / f"logs/{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"reviews/{shard}.parquet")
        for name in ("tar", "few_tar")[: 2 if shard < 2 else 1]:
            write_tar(folder / name / f"{shard}.tar", rows)
    with gzip.open(folder / "archive.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"x": number}) + "\n" for number in range(7))
    return folder


def write_tar(path: Path, rows: list[Any]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows):
            for suffix, text in (("json", json.dumps(row)), ("txt", "text")):
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))


NUM_SAMPLES = {"logs": 20, "archive": 7, "reviews": 20, "tar": 20, "few_tar": 5, "mixture": None}


def test_each_stream_trains_the_same_on_one_process_and_in_parts_on_others(folder):
    pytest.importorskip("datasets")
    configs = {
        stream: two_epochs("tests.docs.test_streams.Reads", folder=str(folder), stream=stream)
        for stream in NUM_SAMPLES
    }
    shuffled = replace(configs["tar"], data=DataConfig(**yaml.safe_load(YAML)["data"]))
    done = train_whole_and_in_parts({**configs, "shuffled": shuffled})
    for stream, (whole, in_parts) in done.items():
        assert whole == in_parts, stream
        num_samples = NUM_SAMPLES.get(stream, NUM_SAMPLES["tar"])
        assert num_samples is None or whole[1] == 2 * num_samples, stream
    assert done["shuffled"][0][0] != done["tar"][0][0]


def test_a_lane_of_tar_shards_goes_on_from_any_state(folder):
    lanes = page(str(folder)).TarShards(folder / "tar")

    def numbers(samples: Iterator[Any]) -> list[int]:
        return [json.loads(sample["json"])["x"] for sample in samples]

    whole = numbers(lanes.iter_lane(0, 0, 2))
    assert len(whole) == 2 + 4 + 6
    for at in range(len(whole) + 1):
        lane = lanes.iter_lane(0, 0, 2)
        assert numbers(itertools.islice(iter(lane), at)) == whole[:at]
        after = lanes.iter_lane(0, 0, 2)
        after.load_state_dict(lane.state_dict())
        assert numbers(after) == whole[at:]
