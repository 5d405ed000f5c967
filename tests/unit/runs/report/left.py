"""Folders as runs leave them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = {
    "time": "2026-11-25T03:34:26+00:00",
    "event": "start",
    "run_id": "a",
    "id": "a",
    "first_step": 1,
    "last_step": 40,
    "world_size": 2,
    "hosts": {"elsewhere": 2},
    "devices": {"cpu": 2},
    "config": {
        "evaluate": {"best": "held_out/accuracy", "best_mode": None},
        "distributed": {"reducer": "ddp"},
    },
}
BEGIN = 1_795_577_666.0
"""Its time, in seconds since the epoch."""


def end(reason: str, **more: Any) -> dict[str, Any]:
    return {
        "time": "2026-11-25T03:35:26+00:00",
        "event": "end",
        "run_id": "a",
        "id": "a",
        "reason": reason,
        **more,
    }


def step(number: int, loss: float | None, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """A line of training."""
    return {
        "epoch": 1,
        "step": number,
        "time": BEGIN + seconds * number,
        "train/loss": loss,
        "train/learning_rate": 0.1,
        **more,
    }


def evaluation(number: int, loss: float, accuracy: float) -> dict[str, Any]:
    values = {"held_out/loss": loss, "held_out/accuracy": accuracy}
    return {"epoch": 1, "step": number, "time": BEGIN + number, **values}


def write_run(
    folder: Path, events: Sequence[Any] = (START,), lines: Sequence[Any] = (), text: str = ""
) -> Path:
    """Write run.jsonl and metrics.jsonl, the latter with some text at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + text)
    return folder
