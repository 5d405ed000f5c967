"""How fast the examples train, against the loop that one would write by hand.

    python benchmarks/speed.py

The ConvNet of `examples/mnist` (4 micro-batches of 16 digits a step, each shifted as it is read; and one of
64) and the GPT of `examples/char_gpt` (4 micro-batches of 8 windows, the gradient clipped), float32, AdamW,
a constant learning rate, one thread in each process, with what malloc each side's own program has. By hand
it is a DataLoader, a loop over micro-batches and, on two processes, DistributedDataParallel with `no_sync`.
`lanewise train` has all its defaults; the others write and show nothing. Below 1 is faster than by hand.
"""

from collections.abc import Iterator

from rounds import Training, take_turns
from section import publish, ratios, spread, table
from workload import Digits, Text

SIDES = ("hand-written", "lanewise train", "Fabric", "Ignite", "Accelerate", "Lightning", "HF Trainer")
CONVNET, GPT = Digits(num_micro_batches=4), Text(num_micro_batches=4)
CASES = (
    ("ConvNet, 4 x 16", CONVNET, 1),
    ("ConvNet, 4 x 16", CONVNET, 2),
    ("ConvNet, 1 x 64", Digits(micro_batch_size=64, num_micro_batches=1), 1),
    ("GPT, 4 x 8", GPT, 1),
    ("GPT, 4 x 8", GPT, 2),
)
"""Title, workload, processes."""


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each case and side."""
    rows = []
    for title, work, num_processes in CASES:
        times = take_turns(
            {side: Training(side=side, work=work, num_processes=num_processes) for side in SIDES},
            num_rounds=num_rounds,
            steps_per_turn=10,
        )
        for side, seconds in times.items():
            ratio = "1" if side == "hand-written" else spread(ratios(seconds, times["hand-written"]))
            speed = spread([work.global_batch_size / one for one in seconds], ",.0f")
            rows.append([title, str(num_processes), side, ratio, speed])
    yield table(["model", "processes", "side", "time / by hand", "samples/s"], rows)


if __name__ == "__main__":
    publish("Speed of the examples", __doc__, measure, num_rounds=12)
