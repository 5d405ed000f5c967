"""A checkpoint that is not what it was is found out, and the file is named."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lanewise.errors import CheckpointError
from lanewise.runs.checkpoint.manifest import FileEntry, Manifest, write_durably

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
CONTENTS = {"part-00000.safetensors": bytes(range(256)), "state.json": b"{}", "empty": b""}


def write(folder: Path) -> Manifest:
    entries = tuple(write_durably(folder / name, content) for name, content in CONTENTS.items())
    manifest = Manifest(3, 0.5, {"seed": 1, "lanes": {"micro_batch_size": 2}}, entries)
    manifest.write(folder)
    return manifest


def test_it_reads_what_it_wrote(tmp_path):
    manifest = write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    manifest.verify(tmp_path)


def test_it_names_every_file_with_size_and_checksum(tmp_path):
    write(tmp_path)
    tree = json.loads((tmp_path / "manifest.json").read_bytes())
    assert [(entry["name"], entry["num_bytes"]) for entry in tree["manifest"]["files"]] == [
        (name, len(content)) for name, content in CONTENTS.items()
    ]
    assert tree["manifest"]["files"][2]["sha256"] == EMPTY


def test_writing_in_pieces_is_writing_at_once(tmp_path):
    whole = write_durably(tmp_path / "a", b"one two")
    pieces = write_durably(tmp_path / "b", b"one", memoryview(b" "), b"", b"two")
    assert (tmp_path / "b").read_bytes() == b"one two"
    assert (pieces.num_bytes, pieces.sha256) == (whole.num_bytes, whole.sha256)


def flip(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize("position", [0, 100, 255])
def test_one_flipped_bit_is_found(tmp_path, position):
    manifest = write(tmp_path)
    path = tmp_path / "part-00000.safetensors"
    path.write_bytes(flip(path.read_bytes(), position))
    with pytest.raises(CheckpointError, match=r"part-00000\.safetensors is damaged: its checksum"):
        manifest.verify(tmp_path)


@pytest.mark.parametrize("name", [name for name, content in CONTENTS.items() if content])
def test_a_truncated_file_is_found(tmp_path, name):
    manifest = write(tmp_path)
    (tmp_path / name).write_bytes(CONTENTS[name][:-1])
    size = len(CONTENTS[name])
    with pytest.raises(CheckpointError, match=f"{name} has {size - 1} bytes instead of {size}"):
        manifest.verify(tmp_path)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_missing_file_is_found(tmp_path, name):
    manifest = write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: No such file"):
        manifest.verify(tmp_path)


@pytest.mark.parametrize("name", ["part-00001.safetensors", ".hidden", "folder"])
def test_a_foreign_file_is_found(tmp_path, name):
    manifest = write(tmp_path)
    (tmp_path / name).mkdir() if name == "folder" else (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"{name} does not belong to the checkpoint"):
        manifest.verify(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_found(tmp_path):
    manifest = write(tmp_path)
    (tmp_path / "empty").unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        manifest.verify(tmp_path)


def test_no_manifest_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="has no manifest"):
        Manifest.read(tmp_path)
    with pytest.raises(CheckpointError, match="has no manifest"):
        Manifest.read(tmp_path / "nothing")


def test_another_format_is_said(tmp_path):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="written by another version of lanewise"):
        Manifest.read(tmp_path)


def test_every_truncated_manifest_is_an_error(tmp_path):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="cannot be read"):
            Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "5",
        '"text"',
        "[]",
        "{}",
        "\xff\xfe",
        '{"format": 1}',
        '{"format": 1, "sha256": "", "manifest": NaN}',
    ],
)
def test_what_is_no_manifest_is_an_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        Manifest.read(tmp_path)


WELL_FORMED = {
    "step": 1,
    "metric": None,
    "identity": {},
    "files": [{"name": "a", "num_bytes": 0, "sha256": EMPTY}],
}


def entry(**fields: object) -> dict[str, object]:
    return {"files": [{"name": "a", "num_bytes": 0, "sha256": EMPTY, **fields}]}


def check(folder: Path) -> None:
    Manifest.read(folder).verify(folder)


def sign(folder: Path, tree: object) -> None:
    folder.mkdir()
    (folder / "a").touch()
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "sha256": digest, "manifest": tree}))


@pytest.mark.parametrize(
    "fields",
    [
        {"step": "1"},
        {"step": None},
        {"step": 1.5},
        {"metric": "good"},
        {"metric": [1]},
        {"metric": math.nan},
        {"identity": 5},
        {"identity": None},
        entry(name=5),
        entry(name=["a"]),
        entry(name=None),
        entry(num_bytes="0"),
        entry(sha256=5),
        entry(name="../a"),
        entry(name="/etc/hostname"),
        entry(name="manifest.json"),
        entry(name="a\0"),
        entry(name="\ud800"),
        entry(name="a" * 5000),
        entry(num_bytes=10**400),
        {"metric": 10**400},
        {"files": 10_000 * WELL_FORMED["files"]},
        {"step": -1},
        {"step": 10**30},
        {"step": True},
    ],
    ids=lambda fields: f"{fields!r:.60}",
)
def test_a_manifest_of_wrong_types_is_an_error(tmp_path, fields):
    sign(tmp_path / "good", WELL_FORMED)
    check(tmp_path / "good")
    sign(tmp_path / "bad", {**WELL_FORMED, **fields})
    with pytest.raises(CheckpointError):
        check(tmp_path / "bad")


NASTY: list[Any] = [
    None,
    True,
    -1,
    10**18,
    10**400,
    1e308,
    "",
    "a",
    "..",
    "/",
    "a/",
    "a\0",
    "\ud800",
    "\udcff",
    "\x1b[31m",
    "a" * 5000,
    [],
    {},
    [[]],
    {"a": {"": None}},
    {"$tensor": "a"},
]


def swap(tree: Any, random: Random) -> Any:
    """Copy a tree with some values replaced, and some keys."""
    if random.random() < 0.1:
        return random.choice(NASTY)
    if isinstance(tree, dict):
        keys = {key: random.choice(["a\0", "\ud800", ""]) if random.random() < 0.02 else key for key in tree}
        return {keys[key]: swap(value, random) for key, value in tree.items()}
    return [swap(value, random) for value in tree] if isinstance(tree, list) else tree


def test_whatever_is_in_a_manifest_it_is_read_or_damaged(tmp_path):
    random, outcomes = Random(5), Counter[str]()
    identity = {"seed": 1, "lanes": {"micro_batch_size": 2}, "best": None, "datasets": [{"length": 3}]}
    for number in range(1000):
        folder = tmp_path / str(number)
        sign(folder, swap({**WELL_FORMED, "identity": identity}, random))
        try:
            check(folder)
        except CheckpointError:
            outcomes["damaged"] += 1
        else:
            outcomes["good"] += 1
    assert min(outcomes["good"], outcomes["damaged"]) > 50, outcomes


def test_a_flipped_bit_in_the_manifest_is_found(tmp_path):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(flip(content, position))
        with pytest.raises(CheckpointError):
            check(tmp_path)


def test_a_manifest_that_is_nested_too_deeply_is_an_error(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_an_entry_of_a_file_is_a_value():
    assert FileEntry("a", 1, "b") == FileEntry("a", 1, "b")


def test_a_manifest_that_is_too_long_is_not_read(tmp_path):
    write(tmp_path)
    with (tmp_path / "manifest.json").open("r+b") as file:
        file.truncate(200 * 2**20)
    with pytest.raises(CheckpointError, match="it has more than 16777216 bytes"):
        Manifest.read(tmp_path)


def test_without_digests_it_is_what_it_was_before_there_were_any(tmp_path):
    Manifest(3, None, {}, ()).write(tmp_path)
    assert "digests" not in (tmp_path / "manifest.json").read_text()
    assert Manifest.read(tmp_path).digests == {}
    Manifest(3, None, {}, (), {"model/weight": "00ff00ff00ff00ff"}).write(tmp_path)
    assert Manifest.read(tmp_path).digests == {"model/weight": "00ff00ff00ff00ff"}
