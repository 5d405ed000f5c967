"""How much faster two processes are than one on the same global batch, beside what the machine can give.

    python benchmarks/scaling.py

Models and settings are those of `benchmarks/speed.py`. The ceiling is two processes by hand, each of which
trains half of every step and never talks to the other: what two cores share keeps even them from twice the
speed. Each side is measured against one process of its own.
"""

from collections.abc import Iterator
from dataclasses import replace

from rounds import Training, take_turns
from section import publish, ratios, spread, table
from speed import CONVNET, GPT, SIDES

CEILING = "the ceiling"


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each model and side."""
    rows = []
    for title, work in (("ConvNet, 4 x 16", CONVNET), ("GPT, 4 x 8", GPT)):
        trainings = {
            (side, num_processes): Training(side=side, work=work, num_processes=num_processes)
            for side in SIDES
            for num_processes in (1, 2)
        }
        trainings[CEILING, 2] = replace(trainings["hand-written", 2], is_alone=True)
        times = take_turns(trainings, num_rounds=num_rounds, steps_per_turn=8)
        ceiling = ratios(times["hand-written", 1], times[CEILING, 2])
        for side in [side for side, num_processes in times if num_processes == 2]:
            alone = times["hand-written" if side == CEILING else side, 1]
            speed_up = ratios(alone, times[side, 2])
            rows.append([title, side, spread(speed_up), spread(ratios(speed_up, ceiling))])
    yield table(["model", "side", "speed-up", "of the ceiling"], rows)


if __name__ == "__main__":
    publish("Two processes over one", __doc__, measure, num_rounds=10)
