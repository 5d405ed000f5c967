"""How long the first batch of an epoch in random order takes, and how much memory.

    python benchmarks/order.py

Micro-batches of 100 of samples that cost nothing, one process; the time is that from the first line of
training, with everything built, to its first batch, the memory what the process needed for it at its peak.
The other sides take their order from torch's samplers, which hold a list of the epoch on every process: some
40 GB for a billion.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from first_batch import SIDES, run
from section import publish, spread, table
from sides import installed

SIZES = (1_000_000, 10_000_000, 1_000_000_000)
LARGEST_LIST = 10_000_000


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each side and number of samples."""
    sides = installed(SIDES)
    cases = [
        (num_samples, side)
        for num_samples in SIZES
        for side in sides
        if num_samples <= LARGEST_LIST or side == "lanewise"
    ]
    found: dict[tuple[int, str], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(num_rounds):
        for num_samples, side in cases:
            with tempfile.TemporaryDirectory() as folder:
                _, seconds, mebibytes = run(side, num_samples, 0, Path(folder))
            found[num_samples, side].append((1e3 * seconds, mebibytes))
    rows = []
    for (num_samples, side), pairs in found.items():
        milliseconds, mebibytes_of_rounds = zip(*pairs, strict=True)
        rows.append(
            [f"{num_samples:,}", side, spread(milliseconds, ".1f"), spread(mebibytes_of_rounds, ".1f")]
        )
    yield table(["samples", "side", "ms to the first batch", "MiB"], rows)


if __name__ == "__main__":
    publish("The first batch", __doc__, measure, num_rounds=3)
