"""Prints a table of one configuration under every reducer, on several numbers of devices.

    python examples/modes.py examples/session_rec/session_rec.yaml --devices 1,2,3 --train.max_steps 100

The metrics are those of the last evaluation in `exact`, where each row must be the first one again: nothing
has to be tuned anew for another mode. Samples per second and the memory of rank 0 are those of a second run,
in `close`. What follows the configuration is given to each run.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

REDUCERS = ("single", "data_parallel", "balanced_data_parallel", "ddp", "fsdp")


class Result(NamedTuple):
    """What a run left."""

    metrics: dict[str, float]
    """Of the last evaluation."""
    samples_per_second: float
    """The median of the lines after the first one."""
    peak_gib: float
    model: str
    """The first digits of the sha256 of `model.safetensors`."""


def run(config: str, reducer: str, num_devices: int, equality: str, overrides: list[str]) -> Result:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "lanewise", "train", config, *overrides]
        options = {
            "train.run_dir": run_dir,
            "distributed.reducer": reducer,
            "distributed.devices": num_devices,
            "distributed.equality": equality,
        }
        command += [f"--{key}={value}" for key, value in options.items()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        model = hashlib.sha256((run_dir / "model.safetensors").read_bytes()).hexdigest()
    steps = [line for line in lines if "train/loss" in line]
    evaluations = [
        line for line in lines if any(name.endswith("/loss") for name in line) and line not in steps
    ]
    metrics = {name: value for name, value in evaluations[-1].items() if "/" in name}
    speeds = [line["perf/samples_per_second"] for line in steps[1:]]
    return Result(metrics, statistics.median(speeds), steps[-1]["memory/peak_gib"], model[:8])


def main() -> None:
    """Run every mode, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--devices", default="1,2", help="numbers of devices, such as 1,2,4")
    options, overrides = parser.parse_known_args()
    rows: list[list[str]] = []
    for num_devices in map(int, options.devices.split(",")):
        for reducer in REDUCERS:
            if (reducer == "single") != (num_devices == 1):
                continue
            exact = run(options.config, reducer, num_devices, "exact", overrides)
            close = run(options.config, reducer, num_devices, "close", overrides)
            if not rows:
                print_row(["mode", "devices", *exact.metrics, "model", "samples/s", "GiB of rank 0"])
                print_row(["---"] * (len(exact.metrics) + 5))
            metrics = [f"{value:.4f}" for value in exact.metrics.values()]
            speed = [f"{close.samples_per_second:,.0f}", f"{close.peak_gib:.2f}"]
            rows.append([*metrics, exact.model])
            print_row([reducer, str(num_devices), *metrics, exact.model, *speed])
    if any(row != rows[0] for row in rows):
        sys.exit("The rows differ, and in exact they must not: lanewise verify says why.")


def print_row(cells: list[str]) -> None:
    """Print a row in Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
