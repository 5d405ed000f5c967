"""How long it takes to go on in the middle of an epoch of two million samples, and where it goes on.

    python benchmarks/resume.py

A model of one weight, micro-batches of 100, an epoch in random order, one process. A run saves after half of
the epoch and reads one more batch. Then each side goes on from its checkpoint in a new process, as its
documentation says; the time is that from the first line of training, with everything built, to its first
batch. By hand it is an order from a seed, of which the sampler gets the rest. Ignite reads with two workers:
without any it goes on with another batch. Lightning warns that it does not put a DataLoader back (its issue
18780).
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from first_batch import BATCH_SIZE, SIDES, run
from section import publish, ratios, spread, table
from sides import installed

NUM_SAMPLES = 2_000_000


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each side."""
    half = NUM_SAMPLES // BATCH_SIZE // 2
    sides = installed(SIDES)
    times: dict[str, list[float]] = {side: [] for side in sides}
    is_right = dict.fromkeys(sides, True)
    with tempfile.TemporaryDirectory() as folder:
        folders = {side: Path(folder) / side for side in sides}
        expected = {}
        for side in sides:
            folders[side].mkdir()
            expected[side] = run(side, NUM_SAMPLES, half, folders[side])[0]
        for _ in range(num_rounds):
            for side in sides:
                samples, seconds, _ = run(side, NUM_SAMPLES, half, folders[side])
                times[side].append(seconds)
                is_right[side] &= samples == expected[side]
    rows = [
        [
            side,
            spread([1e3 * one for one in times[side]], ".1f"),
            spread(ratios(times[side], times["hand-written"]), ".3f"),
            "the next one" if is_right[side] else "another one",
        ]
        for side in sides
    ]
    yield table(["side", "ms to the first batch", "time / by hand", "the first batch is"], rows)


if __name__ == "__main__":
    publish("Going on in the middle of an epoch", __doc__, measure, num_rounds=4)
