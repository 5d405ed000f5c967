"""Trains the MNIST example under every reducer on GPUs, compares the models, and writes a table to the docs.

    python benchmarks/gpu.py [DEVICE] [FILE]

DEVICE is `cuda` or `cpu`; two devices may be one GPU, which gloo shares between processes. The table replaces
the section "GPU" of FILE, docs/benchmarks.md by default.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
from section import PAGE, replace_section, table

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "mnist" / "mnist.yaml"
REDUCERS = ("single", "ddp", "fsdp", "data_parallel", "balanced_data_parallel")
PRECISIONS = ("float32", "bf16")


def main() -> None:
    """Train, compare, and write the table."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE
    rows = []
    for precision in PRECISIONS:
        expected = b""
        for reducer in REDUCERS:
            if reducer == "fsdp" and device == "cuda" and torch.cuda.device_count() < 2:
                continue  # NCCL takes one process on each GPU
            model, samples_per_second = train(device, reducer, precision)
            expected = expected or model
            same = "same bytes" if model == expected else "other bytes"
            num_devices = len(devices(device, reducer))
            rows.append([reducer, str(num_devices), precision, same, f"{samples_per_second:,.0f}"])
            print(*rows[-1], flush=True)
    num_gpus = torch.cuda.device_count()
    hardware = f"{num_gpus} x {torch.cuda.get_device_name()}" if num_gpus else "CPU only"
    today = datetime.now(tz=UTC).date()
    text = f"""## GPU

    make gpu

The MNIST example in `exact`, one epoch; {hardware}, torch {torch.__version__}, {today}.
Devices that outnumber the GPUs share one. Samples/s: the median over the steps.

{table(["reducer", "devices", "precision", "model, against one device", "samples/s"], rows)}
"""
    replace_section(file, "GPU", text)


def devices(device: str, reducer: str) -> list[str]:
    """Name the devices of a reducer: one for `single`, else two."""
    num_gpus = max(1, torch.cuda.device_count())
    numbers = range(1 if reducer == "single" else 2)
    return [f"cuda:{number % num_gpus}" if device == "cuda" else "cpu" for number in numbers]


def train(device: str, reducer: str, precision: str) -> tuple[bytes, float]:
    """Train one epoch; return the model's bytes and the samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        overrides = {
            "distributed.devices": f"[{', '.join(devices(device, reducer))}]",
            "distributed.reducer": reducer,
            "precision": precision,
            "train.epochs": "1",
            "train.run_dir": str(run_dir),
        }
        options = [part for key, value in overrides.items() for part in (f"--{key}", value)]
        command = [sys.executable, "-m", "lanewise", "train", str(CONFIG), *options]
        subprocess.run(command, check=True, capture_output=True)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        speeds = [line["perf/samples_per_second"] for line in lines if "perf/samples_per_second" in line]
        return (run_dir / "model.safetensors").read_bytes(), statistics.median(speeds)


if __name__ == "__main__":
    main()
