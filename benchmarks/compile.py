"""Compiled and eager: a lane of examples/char_gpt.

    python benchmarks/compile.py

Forward and backward of the example's model with its dropout, 8 texts of 64 characters on one thread, as
`compile: auto` (each block by itself) and `compile: whole` make it. All draw the same random numbers, with
torch's own generator: what that costs, and what compilation gains, is in the ratio. Times are CPU times of
one process, in which the sides take turns, after the compilation.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from section import publish, ratios, spread, table
from torch.nn import functional as F

from lanewise.config import CompileConfig
from lanewise.engine.transforms import compile_forwards

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))
from char_gpt import GPT, GPTConfig

EAGER = "eager"


def build_sides() -> dict[str, Callable[[], float]]:
    """Return a forward and backward of the same model for each side, which returns its loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = GPT(GPTConfig(), vocabulary_size=65)
    texts = torch.randint(65, (8, 65))

    def side(model: GPT) -> Callable[[], float]:
        def run() -> float:
            torch.manual_seed(1)
            model.zero_grad()
            loss = F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
            loss.backward()
            return loss.item()

        return run

    models = {EAGER: plain, **{blocks: copy.deepcopy(plain) for blocks in ("auto", "whole")}}
    for blocks in ("auto", "whole"):
        compile_forwards(models[blocks], CompileConfig(blocks=blocks))
    return {name: side(model) for name, model in models.items()}


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each side."""
    sides = build_sides()
    first: dict[str, tuple[float, float]] = {}
    for name, run in sides.items():
        start = time.perf_counter()
        first[name] = run(), time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, run in sides.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    rows = [
        [name, f"{loss:.6f}", f"{seconds:.1f}", spread(ratios(times[EAGER], times[name]))]
        for name, (loss, seconds) in first.items()
    ]
    yield table(["side", "first loss", "seconds of the first lane", "times as fast as eager"], rows)


if __name__ == "__main__":
    publish("Compiled and eager", __doc__, measure, num_rounds=101)
