"""How long a save stops the training loop, against other ways to save the same state.

    python benchmarks/checkpoint.py [FOLDER]

A model of 100 million parameters with AdamW: 1.2 GB of state, one process. The ways take turns, five rounds
after one that warms up; medians. `copy` is a plain copy of the state into memory that was touched before: no
save can stop the loop for less. While lanewise writes in the background, steps of a matrix product go on;
what they lose is the other figure. Accelerate and Lightning Fabric take part where they are installed.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lanewise.checkpoint import CheckpointFolder, Manifest, Saver
from lanewise.engine.state import take_optimizer
from lanewise.world.world import LocalWorld

ROUNDS = 5


def main() -> None:
    """Print one line for each way."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        measure(folder)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path) -> None:
    """Time every way in turns."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3162, 3162, bias=False) for _ in range(10)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": take_optimizer(optimizer, names),
        }

    tensors = list(model.state_dict().values())
    tensors += [value for values in optimizer.state.values() for value in values.values()]
    touched = [torch.empty_like(tensor).fill_(1) for tensor in tensors]
    saver = Saver(
        CheckpointFolder(folder / "ours"), LocalWorld(torch.device("cpu")), keep_last=1, keep_best=0, sign=1
    )
    counter = iter(range(10**6))

    def copy() -> None:
        for target, tensor in zip(touched, tensors, strict=True):
            target.copy_(tensor)

    def ours() -> None:
        saver.save(state(), Manifest(step=next(counter), metric=None, identity={}, files=()))

    def torch_save() -> None:
        torch.save(state(), folder / "torch.pt")

    def distributed_checkpoint() -> None:
        dcp_save(state(), checkpoint_id=folder / "dcp", no_dist=True)

    ways = {"copy": copy, "lanewise": ours, "torch.save": torch_save, "dcp.save": distributed_checkpoint}
    compare({**ways, **installed(model, optimizer, folder)}, saver)


def installed(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, Callable[[], None]]:
    """Return the ways of other libraries, as far as they are there."""
    ways: dict[str, Callable[[], None]] = {}
    if find_spec("accelerate"):
        accelerator = import_module("accelerate").Accelerator(cpu=True)
        prepared = accelerator.prepare(model, optimizer)
        ways["accelerate"] = lambda: accelerator.save_state(str(folder / "accelerate")) and prepared[0]
    if find_spec("lightning"):
        fabric = import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
        objects = {"model": model, "optimizer": optimizer}
        ways["lightning"] = lambda: fabric.save(folder / "lightning.ckpt", objects)
    return ways


def compare(ways: dict[str, Callable[[], None]], saver: Saver) -> None:
    """Let the ways take turns, and print their medians."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    lost = []
    for round_number in range(ROUNDS + 1):
        for name, save in ways.items():
            os.sync()
            start = time.perf_counter()
            save()
            spent = time.perf_counter() - start
            if name == "lanewise":
                lost.append(lose(saver))
            if round_number:
                seconds[name].append(spent)
    for name, times in seconds.items():
        ratio = statistics.median(times) / statistics.median(seconds["copy"])
        print(f"{name:12} {statistics.median(times):6.2f} s   {ratio:5.2f} copies")
    print(f"lost while lanewise writes: {statistics.median(lost[1:]):.2f} s")


def lose(saver: Saver) -> float:
    """Return how much longer steps take while a save is written than afterwards."""
    matrix = torch.ones(400, 400)
    start, num_steps = time.perf_counter(), 0
    while saver.is_writing():
        matrix @ matrix
        num_steps += 1
    spent = time.perf_counter() - start
    saver.finish()
    start = time.perf_counter()
    for _ in range(num_steps):
        matrix @ matrix
    return spent - (time.perf_counter() - start)


if __name__ == "__main__":
    main()
