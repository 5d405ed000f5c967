"""A program that is observed: its command line, its environment, and what its processes noted."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

import torch

from lanewise.commands.verify.foreign.on_path.sitecustomize import VARIABLE
from lanewise.errors import ConfigError, LaunchError, plain_lines
from lanewise.processes.device.choice import count_accelerators

Noted = Mapping[str, Any]
"""What one process noted: `updates`, `passes`, `notes` and `refused`; see `finish` of the observer."""

_ON_PATH = Path(__file__).parent / "on_path"
_PLACEHOLDER = re.compile(r"\{(per_process:(\d+)|folder|processes)\}")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun")
_OFFLINE = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""So that no tracker and no hub hears of a program that runs for a few updates."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LINES_OF_OUTPUT = 15
_TAIL_BYTES = 2**18
"""How much of the end of the output is looked at: it may have printed gigabytes."""
_ENDED_BY_TORCHRUN = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.MULTILINE)
"""Begins what torchrun says after a rank has failed, which is long and says less than the rank."""
_SECONDS_BETWEEN_CHECKS = 0.1
_GRACE_SECONDS = 40
"""Of which torchrun gives 30 to what it has started."""
_PATIENCE_SECONDS = 60
"""How long the other ranks may take when one has seen enough."""


@dataclass(frozen=True)
class ObservedProgram:
    """A program, and how it is observed.

    Args:
        command: as for one process; `{per_process:64}` in it is divided by the number of processes, which
            `{processes}` is, and `{folder}` is a folder of the run's own.
        folder: an empty folder for what is written.
        num_updates: the updates whose gradients are kept.
        until: what is observed: these `updates` only, all into the second `epoch`, or all until an
            `evaluation` has ended.

    Raises:
        ConfigError: if the command cannot be run on several processes as it stands.
    """

    command: Sequence[str]
    folder: Path
    num_updates: int
    until: str = "updates"

    def __post_init__(self) -> None:
        name = Path(self.command[0]).name if self.command else ""
        if not name:
            raise ConfigError("-- needs the program that follows it: got none. Write -- python train.py ...")
        if name in _LAUNCHERS:
            raise ConfigError(
                f"verify starts the processes itself: got {name}. Write the command for one process, as -- "
                "python train.py ..."
            )

    def arguments(self, num_processes: int, folder: Path) -> list[str]:
        """Return the command for each of some processes, with its placeholders filled in."""

        def fill(found: re.Match[str]) -> str:
            if found[1] == "folder":
                return str(folder)
            if found[1] == "processes":
                return str(num_processes)
            if int(found[2]) % num_processes:
                raise ConfigError(
                    f"{found[0]} cannot be divided by {num_processes} processes. Use a multiple of "
                    f"{num_processes}, or other --devices."
                )
            return str(int(found[2]) // num_processes)

        return [_PLACEHOLDER.sub(fill, argument) for argument in self.command]

    def run(self, num_processes: int, name: str, replay: Path | None = None) -> list[Noted]:
        """Run the program until all of its processes have noted enough, or it ends.

        One process runs without torchrun; with it, if it fails without.

        Args:
            num_processes: how many processes.
            name: of a folder for this run.
            replay: a file with what other processes read and the weights that they had, for one process.

        Raises:
            LaunchError: the program failed, or no process of it was seen to train.
        """
        for is_plain in (True, False) if num_processes == 1 else (False,):
            folder = self.folder / name / ("alone" if is_plain else "torchrun")
            (folder / "own").mkdir(parents=True)
            noted, output = self._run(num_processes, folder, replay, is_plain=is_plain)
            if noted:
                return noted
        raise LaunchError(output)

    def _run(
        self, num_processes: int, folder: Path, replay: Path | None, *, is_plain: bool
    ) -> tuple[list[Noted], str]:
        """Run it in one way; return what was noted, and else why there is nothing."""
        command = self.arguments(num_processes, folder / "own")
        if not is_plain:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
            command = [*launcher, "--nproc-per-node", str(num_processes), *command]
        told = {
            "folder": str(folder),
            "num_updates": self.num_updates,
            "until": "updates" if replay else self.until,
            "replay": None if replay is None else str(replay),
            "is_single": num_processes == 1,
        }
        environment = {
            **os.environ,
            **_OFFLINE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_ON_PATH), os.environ.get("PYTHONPATH")])),
            VARIABLE: json.dumps(told),
            **_visible_devices(num_processes),
        }
        files = [folder / f"{rank}.pt" for rank in range(num_processes)]
        with (folder / "output").open("w+b") as output:
            try:
                process = Popen(
                    command, stdin=DEVNULL, stdout=output, stderr=output, env=environment, process_group=0
                )
            except OSError as error:
                raise ConfigError(
                    f"{command[0]} cannot be started: {error.strerror}. Name a program that can."
                ) from error
            try:
                _wait(process, files)
            finally:
                _end(process)
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = output.read().decode(errors="replace")
        noted = [torch.load(file, weights_only=True) for file in files if file.exists()]
        if noted and (folder / "unmatched").exists():
            noted[0]["notes"].append("collate")
        is_whole = len(noted) == num_processes and (
            process.returncode == 0 or all(of_rank["is_complete"] for of_rank in noted)
        )
        if is_whole:
            return noted, ""
        lines = map(plain_lines, _ENDED_BY_TORCHRUN.split(tail)[0].splitlines()[-_LINES_OF_OUTPUT:])
        what = f"{num_processes} process{'es' if num_processes > 1 else ''} of the program ended"
        num_complete = sum(of_rank["is_complete"] for of_rank in noted)
        if num_complete:
            seen = f"{num_complete} had seen enough. Do ranks differ in their updates, or evaluate alone?"
        elif noted:
            seen = "not all that was to be observed was seen."
        else:
            seen = "no update of an optimizer was seen; python -E and -I hide the observer."
        return [], "\n  ".join([f"{what} with code {process.returncode}, and {seen} It wrote last:", *lines])


def _wait(process: "Popen[bytes]", files: Sequence[Path]) -> None:
    """Wait for the end of a program, or a while for ranks that see less than others."""
    since: float | None = None
    while process.poll() is None:
        if since is None and any(file.exists() for file in files):
            since = time.monotonic()
        if since is not None and time.monotonic() > since + _PATIENCE_SECONDS:
            return
        time.sleep(_SECONDS_BETWEEN_CHECKS)


def _end(process: "Popen[bytes]") -> None:
    """End a program, with what it has started; torchrun ends its processes, which are in other groups."""
    for sign, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
        with suppress(TimeoutExpired, ProcessLookupError):
            os.killpg(process.pid, sign)
            process.wait(seconds)


def _visible_devices(num_processes: int) -> dict[str, str]:
    """Show a program as many GPUs as it has processes: a library may use all that it sees."""
    seen = os.environ.get(_VISIBLE) or ",".join(map(str, range(count_accelerators())))
    return {_VISIBLE: ",".join(seen.split(",")[:num_processes])} if seen else {}
