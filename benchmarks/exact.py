"""What the grade `exact` costs over `close`.

    python benchmarks/exact.py

Models and settings are those of `benchmarks/speed.py`, and of `benchmarks/tiny_step.py` with four
micro-batches; `lanewise train` trains each in both grades.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from rounds import Training, take_turns
from section import publish, ratios, spread, table
from speed import CONVNET, GPT
from workload import Equality, Tiny, Workload

CASES: tuple[tuple[str, Workload, int], ...] = (
    ("MLP, 4 x 8", Tiny(num_micro_batches=4), 100),
    ("ConvNet, 4 x 16", CONVNET, 10),
    ("GPT, 4 x 8", GPT, 10),
)
"""Title, workload, steps of a turn."""


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each case and number of processes."""
    rows = []
    for title, work, steps_per_turn in CASES:
        times = take_turns(
            {
                (equality, num_processes): Training(
                    side="lanewise train",
                    work=replace(work, equality=equality),
                    num_processes=num_processes,
                )
                for equality in get_args(Equality)
                for num_processes in (1, 2)
            },
            num_rounds=num_rounds,
            steps_per_turn=steps_per_turn,
        )
        for num_processes in (1, 2):
            exact, close = times["exact", num_processes], times["close", num_processes]
            milliseconds = spread([1e3 * one for one in close])
            rows.append([title, str(num_processes), spread(ratios(exact, close)), milliseconds])
    yield table(["model", "processes", "`exact` / `close`", "ms a step in `close`"], rows)


if __name__ == "__main__":
    publish("`exact` over `close`", __doc__, measure, num_rounds=15)
