"""What a step adds to the loop that one would write by hand, in microseconds.

    python benchmarks/tiny_step.py

An MLP of 16-32-4, SGD, micro-batches of 8 that lie ready in memory and are handed out by `__getitems__`, one
thread in each process. A step costs almost nothing, so what is left is the library. The loop by hand reads
its batches without a DataLoader; on two processes it is DistributedDataParallel with `no_sync`. `lanewise
train` and "its defaults" show progress, and write metrics and checkpoints; the others write and show
nothing. All come to the same loss, to 1e-5.
"""

import statistics
from collections.abc import Iterator

from rounds import Training, take_turns
from section import publish, ratios, spread, table
from sides import SIDES
from workload import Tiny

SHORT, LONG = 1, 5
"""Micro-batches of a step and process."""
STEPS_PER_TURN = {1: 300, 2: 60}
"""By the number of processes."""


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table for one process, and one for two."""
    for num_processes in STEPS_PER_TURN:
        yield compare(num_processes, num_rounds)


def compare(num_processes: int, num_rounds: int) -> str:
    """Return a row for each side."""
    times = take_turns(
        {
            (side, length): Training(
                side=side,
                work=Tiny(num_micro_batches=length * num_processes),
                num_processes=num_processes,
            )
            for side in SIDES
            for length in (SHORT, LONG)
        },
        num_rounds=num_rounds,
        steps_per_turn=STEPS_PER_TURN[num_processes],
    )
    by_hand = times["hand-written", SHORT]
    added = {
        key: [(one - hand) * 1e6 for one, hand in zip(seconds, times["hand-written", key[1]], strict=True)]
        for key, seconds in times.items()
    }
    rows = []
    for side, length in times:
        if length == LONG or side == "hand-written":
            continue
        further = [
            (long - short) / (LONG - SHORT)
            for long, short in zip(added[side, LONG], added[side, SHORT], strict=True)
        ]
        ratio = spread(ratios(times[side, SHORT], by_hand))
        rows.append([side, spread(added[side, SHORT], ".0f"), spread(further, ".0f"), ratio])
    header = [
        f"{num_processes} process(es), {statistics.median(by_hand) * 1e6:.0f} us by hand",
        "added to a step, us",
        "to each further micro-batch, us",
        "step / by hand",
    ]
    return table(header, rows)


if __name__ == "__main__":
    publish("What a step adds", __doc__, measure, num_rounds=25)
