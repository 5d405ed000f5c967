"""The loss of a large vocabulary in chunks, against whole logits: time and memory.

    python benchmarks/linear_cross_entropy.py

Forward and backward of a linear layer with 40,000 outputs and its cross entropy in float32, with gradients of
the hidden states and of the weight, one thread. By hand it is `cross_entropy(linear(hidden, weight))`. Of
torch it is `torch.nn.functional.linear_cross_entropy` (from 2.13 on) with chunks of 256 tokens, as many as
lanewise takes. Times are CPU times of one process, in which the sides take turns; the memory is what a
process of its own needed at its peak beyond what it had before, the gradients included.

The three matrix products are the same on all sides. The wider the hidden states, the larger is their share of
the time, and the less there is to gain.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from section import publish, ratios, spread, table
from torch import nn
from torch.nn import functional as F

from lanewise.nn import LinearCrossEntropy

NUM_CLASSES = 40_000
TOKENS = (8_000, 2_000)
WIDTHS = (64, 128, 256)
BY_HAND = "by hand"


def build_sides(num_tokens: int, width: int, num_classes: int = NUM_CLASSES) -> dict[str, Callable[[], None]]:
    """Return what computes the loss and its gradients, by side; all of the same tensors."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    head = LinearCrossEntropy(width, num_classes, bias=False)
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    targets = torch.randint(num_classes, (num_tokens,))

    def by_hand() -> torch.Tensor:
        return F.cross_entropy(head.logits(hidden), targets)

    def by_torch() -> torch.Tensor:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
        return F.linear_cross_entropy(hidden, head.weight, targets, options=options)

    def by_lanewise() -> torch.Tensor:
        loss = head(hidden, targets)
        mean: torch.Tensor = loss.sum / loss.weight
        return mean

    def with_gradients(compute: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = head.weight.grad = None
            compute().backward()

        return run

    sides = {BY_HAND: by_hand, "lanewise": by_lanewise, "torch": by_torch}
    if not hasattr(F, "linear_cross_entropy"):
        del sides["torch"]
    return {side: with_gradients(compute) for side, compute in sides.items()}


def additional_mebibytes(side: str, num_tokens: int, width: int) -> float:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, side, str(num_tokens), str(width)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_kib() -> int:
    """Return the largest amount of memory that this process has had since it began to run its program."""
    (found,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found)


def print_memory(side: str, num_tokens: int, width: int) -> None:
    """Run a side once, and print the MiB that it needed."""
    run = build_sides(num_tokens, width)[side]
    build_sides(8, width, num_classes=8)[side]()  # loads what torch loads late
    start = peak_kib()
    run()
    print((peak_kib() - start) / 1024)


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each shape and side."""
    rows = []
    for num_tokens in TOKENS:
        for width in WIDTHS:
            sides = build_sides(num_tokens, width)
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(num_rounds + 1):
                for side, run in sides.items():
                    start = time.process_time()
                    run()
                    times[side].append(time.process_time() - start)
            mebibytes = {side: additional_mebibytes(side, num_tokens, width) for side in sides}
            rows += [
                [
                    f"{num_tokens:,}",
                    str(width),
                    side,
                    spread(ratios(times[side][1:], times[BY_HAND][1:])),
                    spread(times[side][1:]),
                    f"{mebibytes[side]:,.0f}",
                    f"1 / {mebibytes[BY_HAND] / mebibytes[side]:.1f}",
                ]
                for side in sides
            ]
    header = [
        "tokens",
        "width",
        "side",
        "CPU time / by hand",
        "CPU seconds",
        "additional MiB",
        "of that by hand",
    ]
    yield table(header, rows)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2].isdigit():
        print_memory(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        publish("The loss of a large vocabulary", __doc__, measure, num_rounds=5)
