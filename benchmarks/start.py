"""What starting two processes costs: `lanewise train` for one step against a bare torchrun script with DDP.

    python benchmarks/start.py [ROUNDS]

Both start from nothing and take one step of the same model on the same batch. They take turns, so that a busy
machine slows both; the ratio of each round counts.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent

BARE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.arange(8.0).unsqueeze(1)[dist.get_rank() :: 2]
nn.functional.mse_loss(model(inputs), 2 * inputs).backward()
optimizer.step()
dist.destroy_process_group()
"""

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lanewise


class Line(lanewise.Task):
    def build_model(self):
        return nn.Linear(1, 1)

    def train_dataset(self):
        inputs = torch.arange(8.0).unsqueeze(1)
        return TensorDataset(inputs, 2 * inputs)

    def forward(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])
"""

CONFIG = """
task: {class_path: line.Line}
batch: {global_batch_size: 8, micro_batch_size: 4}
train: {epochs: 1, run_dir: run}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.01}}
distributed: {devices: 2}
"""


def measure(*command: object, cwd: Path) -> tuple[float, float]:
    """Run a command to its end; return its seconds, by the clock and of CPU time with all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(num_rounds: int) -> None:
    """Measure, and print every round and the medians."""
    ratios = []
    for number in range(num_rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, text in (("bare.py", BARE), ("line.py", TASK), ("line.yaml", CONFIG)):
                (folder / file).write_text(text)
            bare = measure(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, "bare.py", cwd=folder)
            ours = measure(BIN / "lanewise", "train", "line.yaml", cwd=folder)
        ratios.append((ours[0] / bare[0], ours[1] / bare[1]))
        print(
            f"round {number}: torchrun {bare[0]:.2f} s ({bare[1]:.2f} s CPU), "
            f"lanewise {ours[0]:.2f} s ({ours[1]:.2f} s CPU), ratio {ratios[-1][0]:.2f} ({ratios[-1][1]:.2f})"
        )
    clock, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median ratio {clock:.2f} ({cpu:.2f} of CPU time)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
