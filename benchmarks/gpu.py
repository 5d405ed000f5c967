"""Trains under every reducer on GPUs: compares models, measures GPTs, and writes tables to the results.

    python benchmarks/gpu.py [DEVICE] [FILE]

DEVICE is `cuda` or `cpu`; two devices may be one GPU, which gloo shares between processes. On `cpu` the GPT
is tiny, to see that the script works. The tables replace the section "GPU" of FILE, results.md by
default. With several GPUs `lanewise bench` measures ddp and fsdp on all of them, over NCCL.
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
from large_gpt import NUM_LANES, WIDEST, configured
from section import PAGE, replace_section, table, versions

ROOT = Path(__file__).parents[1]
MNIST = ROOT / "examples" / "mnist" / "mnist.yaml"
REDUCERS = ("single", "ddp", "fsdp", "data_parallel", "balanced_data_parallel")
PRECISIONS = ("float32", "bf16")
GPTS = (
    ("124M", 8, 50.0),
    ("124M", 32, 80.0),
    ("350M", 16, 80.0),
    ("char", 8, 10.0),
    ("char", 256, 10.0),
)
"""Sizes and micro-batches that are measured, and for how many seconds. The last two show what the host costs
a small model, and whether a larger micro-batch hides it."""
TINY = (("tiny", 4, 10.0),)
BENCH_SECONDS = 120.0


def main() -> None:
    """Train, compare, measure, and write the tables."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE
    models = compare_models(device)
    speeds = measure_gpts(device)
    num_gpus = torch.cuda.device_count()
    several = bench(device, num_gpus) if num_gpus > 1 or device == "cpu" else ""
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

A GPT on one device, {NUM_LANES} micro-batches a step, bf16, AdamW, the gradient clipped, compiled as a
whole with its loss, all sides in turns in one process (`benchmarks/large_gpt.py`). Time / by hand: the
median over rounds with the middle half; one that is wider than {WIDEST:.0%} is left out. MFU counts 6
operations for each weight but those of positions, and attention as if it were not causal. Host: the time of
the CPU in a step.

{speeds}

{several}
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


def measure_gpts(device: str) -> str:
    """Measure GPTs; return a row for each side, its kernels, and what a save costs."""
    rows, texts = [], []
    for size, micro_batch_size, seconds in GPTS if device == "cuda" else TINY:
        program = Path(__file__).with_name("large_gpt.py")
        options = [device, size, str(micro_batch_size), str(seconds), "--trace"]
        done = subprocess.run(
            [sys.executable, program, *options], check=False, stdout=subprocess.PIPE, text=True
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            texts.append(f"{size} with micro-batches of {micro_batch_size} failed.")
        for line in lines:
            if "side" in line:
                low, ratio, high = line["ratio"]
                rows.append(
                    [
                        f"{size}, {micro_batch_size}",
                        line["side"],
                        f"{line['tokens_per_second']:,.0f}",
                        f"{ratio:.3f} ({low:.3f} to {high:.3f})" if line["is_steady"] else "not steady",
                        percent(line["utilization"]),
                        f"{line['host_milliseconds']:.1f} of {line['milliseconds']:.1f} ms",
                    ]
                )
            elif "traced" in line and line["busy"] is not None:
                kernels = ", ".join(
                    f"`{name}` {spent:.2f} ms" for name, spent in line["largest_milliseconds"]
                )
                texts.append(
                    f"{size}, {micro_batch_size}, {line['traced']}: {line['kernels']:.0f} kernels a step; "
                    f"the device computes {line['busy']:.1%} of the time; most of it: {kernels}."
                )
            elif "stopped_seconds" in line:
                texts.append(
                    f"A save of {size} and AdamW's state stops the loop for {line['stopped_seconds']:.3f} s, "
                    f"and is on disk after {line['written_seconds']:.3f} s."
                )
        print(*rows, *texts, sep="\n", flush=True)
    heads = ["GPT, micro-batch", "", "tokens/s", "time / by hand", "MFU", "host"]
    return "\n\n".join([table(heads, rows), *dict.fromkeys(texts)])


def percent(part: float | None) -> str:
    """Write a part; empty where it is not known."""
    return "" if part is None else f"{part:.0%}"


def bench(device: str, num_gpus: int) -> str:
    """Return the table of `lanewise bench` for the GPT on all GPUs."""
    size, micro_batch_size, seconds = ("124M", 32, BENCH_SECONDS) if device == "cuda" else ("tiny", 4, 5.0)
    config = configured(device, size, micro_batch_size, "exact")
    # fsdp gathers weights between blocks, so it cannot have a whole that is compiled as one.
    config |= {"search_path": str(Path(__file__).parent), "compile": {}}
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "gpt.json", Path(folder) / "report.json"
        path.write_text(json.dumps(config))
        options = [
            "--devices",
            f"1,{max(2, num_gpus)}",
            "--reducers",
            "single,ddp,fsdp",
            "--seconds",
            str(seconds),
        ]
        command = [sys.executable, "-m", "lanewise", "bench", str(path), *options, "--json", str(report)]
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    rows = [
        [
            row["name"].partition(" on ")[0],
            str(row["num_devices"]),
            row["equality"],
            row["failure"] or f"{row['samples_per_second']['median']:,.0f}",
            "" if row["failure"] else percent(row["phases"]["communication"]),
            f"{row['fullest_bytes'] / 2**30:.1f}" if row["fullest_bytes"] else "",
        ]
        for row in found
    ]
    heads = ["", "devices", "grade", "samples/s", "communication that nothing hides", "GiB"]
    return f"`lanewise bench`, {size} with micro-batches of {micro_batch_size}:\n\n{table(heads, rows)}"


if __name__ == "__main__":
    main()
