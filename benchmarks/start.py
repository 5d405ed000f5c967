"""How long importing and starting take.

    python benchmarks/start.py

Importing: an interpreter that imports what a program needs of a library, beside one that imports torch.
Starting: from the command to its end, two processes that take one step of a tiny model, beside a torchrun
script with DistributedDataParallel. The others are started by torchrun as well, lanewise by `lanewise
train`.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from section import publish, ratios, spread, table
from sides import installed, lanewise_config
from workload import Tiny

IMPORTS = {
    "lanewise": "from lanewise import Lanes, Task",
    "Fabric": "from lightning.fabric import Fabric",
    "Ignite": "import ignite.distributed; from ignite.engine import Engine",
    "Accelerate": "from accelerate import Accelerator",
    "Lightning": "from lightning import LightningModule, Trainer",
    "HF Trainer": "from transformers import Trainer, TrainingArguments",
}
STARTED = ("hand-written", "lanewise train", "Fabric", "Ignite", "Accelerate", "Lightning", "HF Trainer")
WORK = Tiny(num_micro_batches=2)


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table for each."""
    statements = {"torch": "import torch", **{side: IMPORTS[side] for side in installed(IMPORTS)}}
    imports = {side: [sys.executable, "-c", statement] for side, statement in statements.items()}
    starts = {side: start(side) for side in installed(STARTED)}
    yield compare("import", imports, num_rounds)
    yield compare("start", starts, num_rounds)


def start(side: str) -> list[str]:
    """Return the command that starts a side on two processes."""
    if side == "lanewise train":
        return [sys.executable, "-m", "lanewise", "train", "work.json", "--distributed.devices", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, str(Path(__file__).with_name("sides.py")), side, WORK.name, json.dumps(asdict(WORK))]


def compare(title: str, commands: Mapping[str, Sequence[str]], num_rounds: int) -> str:
    """Run commands in turns; return a row for each, the first being what the others are compared with."""
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in commands}
    for _ in range(num_rounds + 1):
        for side, command in commands.items():
            found[side].append(run(command))
    columns = {
        side: list(zip(*pairs[1:], strict=True)) for side, pairs in found.items()
    }  # the first warms up
    base = next(iter(columns.values()))
    rows = [
        [side, spread(clock), spread(ratios(clock, base[0])), spread(ratios(cpu, base[1]))]
        for side, (clock, cpu) in columns.items()
    ]
    first = next(iter(commands))
    return table([title, "seconds", f"time / {first}", f"CPU time / {first}"], rows)


def run(command: Sequence[str]) -> tuple[float, float]:
    """Run a command to its end; return its seconds, by the clock and of CPU time with all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "work.json").write_text(json.dumps(lanewise_config(WORK)), encoding="utf-8")
        # The round that warms up leaves the bytecode that pip leaves of what it installs.
        variables = {name: one for name, one in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            env={**variables, "OMP_NUM_THREADS": "1"},
        )
        seconds = time.perf_counter() - begin
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-5000:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    publish("Starting", __doc__, measure, num_rounds=5)
