"""Trains under every reducer on GPUs: compares models, measures a GPT of 124M, and writes tables to the docs.

    python benchmarks/gpu.py [DEVICE] [FILE]

DEVICE is `cuda` or `cpu`; two devices may be one GPU, which gloo shares between processes. On `cpu` the GPT
is tiny, to see that the script works. The tables replace the section "GPU" of FILE, results.md by
default.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from large_gpt import LEARNING_RATE, MAX_GRAD_NORM, NUM_LANES, SIZES
from section import PAGE, replace_section, table, versions

ROOT = Path(__file__).parents[1]
MNIST = ROOT / "examples" / "mnist" / "mnist.yaml"
REDUCERS = ("single", "ddp", "fsdp", "data_parallel", "balanced_data_parallel")
PRECISIONS = ("float32", "bf16")
SECONDS = 90.0
"""For which `lanewise bench` measures the GPT."""


def main() -> None:
    """Train, compare, measure, and write the tables."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE
    models = compare_models(device)
    speeds, saves = measure_gpt(device)
    num_gpus = torch.cuda.device_count()
    hardware = (
        f"{num_gpus} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if num_gpus else "CPU only"
    )
    today = datetime.now(tz=UTC).date()
    text = f"""## GPU

    make gpu

{hardware}; {", ".join(versions())}; {today}.

The MNIST example in `exact`, one epoch. Devices that outnumber the GPUs share one. Samples/s: the median
over the steps.

{models}

A GPT of {"124M parameters" if device == "cuda" else "tiny size"}, {NUM_LANES} micro-batches a step, bf16,
AdamW, the gradient clipped, compiled as a whole. By hand: a loop without a loader, on one device
(`benchmarks/large_gpt.py`), before and after the others, which `lanewise bench` measures; time: that of a
device for as many tokens.
MFU: the part of the operations that the device could do, where that is known. Not hidden: the part of a step
that is communication which no computation overlaps. "(never talking)": what the devices would do if they
exchanged nothing.

{speeds}

{saves}
"""
    replace_section(file, "GPU", text)


def compare_models(device: str) -> str:
    """Train the MNIST example under every reducer; return a row for each."""
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
    return table(["reducer", "devices", "precision", "model, against one device", "samples/s"], rows)


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
        command = [sys.executable, "-m", "lanewise", "train", str(MNIST), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        speeds = [line["perf/samples_per_second"] for line in lines if "perf/samples_per_second" in line]
        return (run_dir / "model.safetensors").read_bytes(), statistics.median(speeds)


def measure_gpt(device: str) -> tuple[str, str]:
    """Measure the GPT by hand and by lanewise; return a row for each way, and what a save costs."""
    size, seconds = ("124M", SECONDS) if device == "cuda" else ("tiny", 5.0)
    before = measure_by_hand(device, size, seconds / 6)
    measured = [row for row in bench(device, size, seconds) if row["samples_per_second"]]
    after = measure_by_hand(device, size, seconds / 6)
    speeds = [run["samples_per_second"] for run in (before, after)]
    speed = statistics.mean(speeds)
    alone = next(row for row in measured if row["num_devices"] == 1)
    utilization = (
        alone["utilization"] and alone["utilization"] * speed / alone["samples_per_second"]["median"]
    )
    context = SIZES[size].model.context
    tokens = " and ".join(f"{run * context:,.0f}" for run in speeds)
    rows = [["by hand", "1", "", tokens, "1", percent(utilization), "", ""]]
    for row in measured:
        own, count = row["samples_per_second"]["median"], row["num_devices"]
        gibibytes = f"{row['fullest_bytes'] / 2**30:.1f}" if row["fullest_bytes"] else ""
        hidden = percent(row["phases"]["communication"]) if count > 1 else ""
        times = f"{count * speed / own:.2f}"
        rows.append(
            [
                row["name"].partition(" on ")[0],
                str(count),
                row["equality"],
                f"{own * context:,.0f}",
                times,
                percent(row["utilization"]),
                hidden,
                gibibytes,
            ]
        )
    heads = ["", "devices", "grade", "tokens/s", "time / by hand", "MFU", "not hidden", "GiB"]
    stopped, written = after["stopped_seconds"], after["written_seconds"]
    saves = (
        f"A save of this model and AdamW's state stops the loop for {stopped:.3f} s, and is on disk after "
        f"{written:.3f} s."
    )
    text = table(heads, rows)
    print(text, saves, sep="\n\n", flush=True)
    return text, saves


def measure_by_hand(device: str, size: str, seconds: float) -> dict[str, float]:
    """Run `large_gpt.py`; return what it prints."""
    loop = [sys.executable, str(Path(__file__).with_name("large_gpt.py")), device, size, str(seconds)]
    printed = subprocess.run(loop, check=True, stdout=subprocess.PIPE, text=True).stdout
    by_hand: dict[str, float] = json.loads(printed.splitlines()[-1])
    return by_hand


def percent(part: float | None) -> str:
    """Write a part; empty where it is not known."""
    return "" if part is None else f"{part:.0%}"


def bench(device: str, size: str, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of `lanewise bench` for the GPT, on one device and on all GPUs."""
    num_devices = torch.cuda.device_count() if device == "cuda" else 2
    config = {
        "search_path": str(Path(__file__).parent),
        "task": {"class_path": "large_gpt.LargeGPT", "init_args": {"size": size}},
        "batch": {
            "global_batch_size": NUM_LANES * SIZES[size].micro_batch_size,
            "micro_batch_size": SIZES[size].micro_batch_size,
        },
        "train": {"max_steps": 1000, "run_dir": "unused", "max_grad_norm": MAX_GRAD_NORM},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": LEARNING_RATE}},
        "precision": "bf16",
        "compile": "whole",
        "distributed": {"device_type": device},
    }
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "gpt.json", Path(folder) / "report.json"
        path.write_text(json.dumps(config))
        options = ["--devices", f"1,{num_devices}", "--reducers", "single,ddp", "--seconds", str(seconds)]
        command = [sys.executable, "-m", "lanewise", "bench", str(path), *options, "--json", str(report)]
        subprocess.run(command, check=True)
        rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    for row in rows:
        if row["failure"]:
            print(f"{row['name']} failed: {row['failure']}", flush=True)
    return rows


if __name__ == "__main__":
    main()
