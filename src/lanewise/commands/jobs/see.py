"""`python -m lanewise.commands.jobs.see EQUALITY DEVICE_TYPE RUN_DIR LAUNCH`: what a host sees of a run.

It prints a `Sight` as JSON.
"""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from lanewise.errors import LanewiseError
from lanewise.launch.membership import Sight
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.dir import RunDir
from lanewise.runs.record import last_logged_step

_NO_PINS = ("threads", "random_numbers")
"""What else a checkpoint of `exact` says, which does not depend on the host."""


def see(equality: str, device_type: str, run_dir: RunDir, launch: str) -> Sight:
    """Look at a run directory, and at this machine.

    Args:
        equality: `close` or `exact`.
        device_type: as in the configuration.
        run_dir: need not exist.
        launch: its id.
    """
    import torch

    from lanewise.processes.device.choice import choose_devices
    from lanewise.processes.device.determinism import exact_pins

    pins, saved = {}, None
    if equality == "exact":
        device = "cpu"
        with suppress(LanewiseError):  # the run itself says what is wrong with its devices
            (device,) = choose_devices(device_type, 1, ())
        pins = exact_pins(torch.device(device))
    for folder in CheckpointFolder(run_dir.checkpoints).all():
        with suppress(LanewiseError):
            saved = Manifest.read(folder)
            break
    step = 0 if saved is None else saved.step
    last = last_logged_step(run_dir.metrics)
    pins_of_run = {} if saved is None else saved.identity.get("exact") or {}
    return Sight(
        holds_launch=run_dir.record.exists() and launch in run_dir.record.read_text(encoding="utf-8"),
        saved_step=step,
        steps_lost=None if last is None else max(0, last - step),
        idle_seconds=None if last is None else max(0.0, time.time() - run_dir.metrics.stat().st_mtime),
        pins=pins,
        pins_of_run={name: value for name, value in pins_of_run.items() if name not in _NO_PINS},
    )


if __name__ == "__main__":
    equality, device_type, run_dir, launch = sys.argv[1:]
    print(json.dumps(asdict(see(equality, device_type, RunDir(Path(run_dir)), launch))))  # noqa: T201
