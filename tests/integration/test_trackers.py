"""A run that is killed and goes on, on another number of devices, is one run in a tracker, each step once.

What is read back are the trackers' own files.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from PIL import Image

from tests.integration.command import LANEWISE, Done, run, write_config
from tests.listening import reserve_port

NUM_STEPS = 18
KILLED_AFTER = 14
EVALUATED = [3, 6, 9, 12, 15, 18]
SHOWN = sorted([0, 10, *EVALUATED])
"""After which steps the model is shown: also when a start begins, the second one after step 10."""
THEIR_WARNINGS = {"PYTHONWARNINGS": "ignore"}
"""Warnings of other packages, which are errors in all other tests."""
SECTIONS: dict[str, Any] = {
    "log": {"every_steps": 1},
    "evaluate": {"every_epochs": 1},
    "checkpoint": {"every": {"steps": 5}},
}


def cold(*arguments: object, **options: Any) -> Done:
    """Run `lanewise ARGUMENTS` in an interpreter that is told to ignore warnings of other packages."""
    options["variables"] = {**options.get("variables", {}), **THEIR_WARNINGS}
    return run(*LANEWISE, *arguments, **options)


def train_killed_and_resumed(
    folder: Path, tracker: dict[str, Any], program: Callable[..., Done] = cold, **variables: str
) -> Path:
    """Train on one device until it is killed, and go on on two."""
    kill = {"class_path": "tasks.KillsItself", "init_args": {"after_step": KILLED_AFTER}}
    config = write_config(
        folder, "tasks.Evaluated", **SECTIONS, train={"epochs": 6, "run_dir": str(folder / "run")}
    )
    shows = {"class_path": "showing.Shows"}
    both = f"--callbacks={json.dumps([tracker, shows, kill])}"
    killed = program("train", config, both, cwd=folder, variables=variables)
    assert killed.code == -9, killed.stderr
    resumed = ("--resume", "--distributed.devices=2", f"--callbacks={json.dumps([tracker, shows])}")
    done = program("train", config, *resumed, cwd=folder, variables=variables).require_success()
    assert "resuming from" in done.stderr
    return folder / "run"


def require_each_once(trained: list[int], evaluated: list[int]) -> None:
    assert Counter(trained) == Counter(range(1, NUM_STEPS + 1))
    assert Counter(evaluated) == Counter(EVALUATED)


def digest_of(run_dir: Path) -> str:
    return sha256((run_dir / "model.safetensors").read_bytes()).hexdigest()


def records(file: Path) -> Iterator[Any]:
    """Read a .wandb file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        part = data[place + 7 : place + 7 + size]
        place += 7 + size
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield Record.FromString(parts)


def require_files(run_dir: Path, found: list[Any]) -> None:
    """Each text, image and figure has a file, also what the killed start had shown."""
    shown: dict[tuple[int, str], dict[str, Any]] = {}
    for record in found:
        for item in record.history.item:
            if len(item.nested_key) == 2:
                name, key = item.nested_key
                media = shown.setdefault((record.history.step.num, name), {})
                media[key] = json.loads(item.value_json)
    kinds = Counter((name, media["_type"]) for (_, name), media in shown.items())
    expected = {("words", "html-file"), ("noise", "image-file"), ("curve", "image-file")}
    assert kinds == dict.fromkeys(expected, len(SHOWN))
    for media in shown.values():
        (file,) = run_dir.glob(f"wandb/offline-run-*/files/{media['path']}")
        assert sha256(file.read_bytes()).hexdigest() == media["sha256"]


@pytest.mark.slow
def test_weights_and_biases(tmp_path):
    tracker = {"class_path": "lanewise.trackers.WandB", "init_args": {"project": "mine", "offline": True}}
    run_dir = train_killed_and_resumed(tmp_path, tracker)
    found = [one for file in run_dir.glob("wandb/offline-run-*/*.wandb") for one in records(file)]
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.history.item}
        for one in found
        if one.WhichOneof("record_type") == "history"
    ]
    steps = {name: [row["step"] for row in rows if name in row] for name in ("train/loss", "all/loss")}
    require_each_once(steps["train/loss"], steps["all/loss"])
    require_files(run_dir, found)
    runs = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    started = json.loads((run_dir / "run.jsonl").read_text().splitlines()[0])
    assert {(one.project, one.run_id) for one in runs} == {("mine", started["run_id"])}
    assert any(item.key == "optimizer" for one in runs for item in one.config.update)
    summary = {
        item.nested_key[0] if item.nested_key else item.key: item.value_json
        for one in found
        for item in one.summary.update
    }
    assert json.loads(summary["lanewise/model_sha256"]) == digest_of(run_dir)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    port = reserve_port()
    command = [
        *(Path(sys.executable).parent / "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *(
            "--backend-store-uri",
            f"sqlite:///{folder}/mlflow.db",
            "--artifacts-destination",
            str(folder / "files"),
        ),
        *("--workers", "1"),
    ]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **THEIR_WARNINGS}
        )
    try:
        for _ in range(600):
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 15)
        server.wait()


@pytest.mark.slow
def test_mlflow(tmp_path):
    with mlflow_server(tmp_path) as uri:
        tracker = {"class_path": "lanewise.trackers.MLflow", "init_args": {"tracking_uri": uri}}
        run_dir = train_killed_and_resumed(tmp_path, tracker)
    database = sqlite3.connect(tmp_path / "mlflow.db")
    ((run_id, status),) = database.execute("SELECT run_uuid, status FROM runs").fetchall()
    assert status == "FINISHED"
    of_key = "SELECT step FROM metrics WHERE key = ?"
    trained, evaluated = (
        [step for (step,) in database.execute(of_key, (key,))] for key in ("train/loss", "all/loss")
    )
    require_each_once(trained, evaluated)
    tags = dict(database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run_id,)))
    assert tags["lanewise.model_sha256"] == digest_of(run_dir)
    params = dict(database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run_id,)))
    assert params["optimizer.class_path"] == '"torch.optim.SGD"'
    assert len(list((tmp_path / "files").rglob("config.yaml"))) == 1
    (media,) = (tmp_path / "files").rglob("media")
    expected = {"curve": "png", "noise": "png", "words": "txt"}
    for name, ending in expected.items():
        files = sorted(path.name for path in (media / name).iterdir())
        # Step 10 is left out where later lines had arrived when the run was killed.
        steps = [step for step in SHOWN if step != 10 or f"{step:06}.{ending}" in files]
        assert files == [f"{step:06}.{ending}" for step in steps]
    assert (media / "words" / "000018.txt").read_text() == "<after> 18"
    with Image.open(media / "noise" / "000018.png") as image:
        assert image.size == (3, 2)


@pytest.mark.slow
def test_a_server_that_is_not_there_does_not_stop_a_run(tmp_path):
    tracker = {"class_path": "lanewise.trackers.MLflow", "init_args": {"tracking_uri": "http://127.0.0.1:9"}}
    config = write_config(tmp_path, callbacks=[tracker])
    done = cold("train", config, variables={"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}).require_success()
    (said,) = [line for line in done.stderr.splitlines() if "MLflow takes no more numbers" in line]
    assert "127.0.0.1" in said
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_trackio(tmp_path):
    tracker = {"class_path": "lanewise.trackers.Trackio", "init_args": {"project": "mine"}}
    run_dir = train_killed_and_resumed(tmp_path, tracker, TRACKIO_DIR=str(tmp_path / "trackio"))
    database = sqlite3.connect(tmp_path / "trackio" / "mine.db")
    rows = [
        (name, step, json.loads(metrics))
        for name, step, metrics in database.execute("SELECT run_name, step, metrics FROM metrics")
    ]
    started = json.loads((run_dir / "run.jsonl").read_text().splitlines()[0])
    assert {name for name, _, _ in rows} == {f"run-{started['run_id'][:8]}"}
    trained, evaluated = (
        [step for _, step, metrics in rows if key in metrics] for key in ("train/loss", "all/loss")
    )
    require_each_once(trained, evaluated)
    assert [row["lanewise/model_sha256"] for _, _, row in rows if "lanewise/model_sha256" in row] == [
        digest_of(run_dir)
    ]
