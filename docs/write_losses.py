"""Prints docs/_static/losses.svg, the picture of the README, from runs: `python docs/write_losses.py`.

The digits of the README are trained on 1, 2 and 3 processes, by a loop with DistributedDataParallel as it is
usually written, and by lanewise.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lanewise
from lanewise.testing import run_distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "digits"))
from digits import Digits

PROCESSES = (1, 2, 3)
NUM_EPOCHS = 8
BATCH_SIZE = 32
WIDTH, HEIGHT, MARGIN = 320, 190, 44
COLORS = ("#3b82f6", "#f97316", "#10a37f")
STROKES = (8, 4.5, 1.5)
"""The lines of more processes are drawn over the others, and are thinner."""


def by_hand(world: Any) -> list[float]:
    """Return the loss on held-out digits after each epoch; each process has the whole batch size."""
    torch.manual_seed(0)
    task = Digits()
    data, model = task.train_dataset(), task.build_model()
    held_out, answers = task.eval_datasets()["held_out"].tensors
    sampler = DistributedSampler(data, world.world_size, world.rank)  # pads its part
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
    trained = DistributedDataParallel(model) if world.world_size > 1 else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.001)
    losses = []
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        trained.train()
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(trained(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(cross_entropy(model.eval()(held_out), answers).item())
    return losses


def by_lanewise(num_processes: int) -> list[float]:
    """Return the loss on held-out digits after each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        lanewise.train(
            Digits(),
            batch={"global_batch_size": BATCH_SIZE, "micro_batch_size": BATCH_SIZE // 4},
            train={"epochs": NUM_EPOCHS, "run_dir": f"{folder}/run"},
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
            distributed={"devices": num_processes, "equality": "exact", "device_type": "cpu"},
        )
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line["held_out/loss"] for line in lines if "held_out/loss" in line]


def measure() -> dict[str, list[list[float]]]:
    """Return the losses of each way, on each number of processes."""
    return {
        "DDP as it is usually written": [
            run_distributed(by_hand, num, timeout_seconds=600)[0] for num in PROCESSES
        ],
        "lanewise": [by_lanewise(num) for num in PROCESSES],
    }


def draw(ways: dict[str, list[list[float]]]) -> str:
    """Return the picture: a panel for each way."""
    width, height = 2 * (WIDTH + MARGIN) + MARGIN, HEIGHT + 2 * MARGIN
    losses = [loss for runs in ways.values() for run in runs for loss in run]
    panels = "\n".join(
        panel(number, *way, min(losses), max(losses)) for number, way in enumerate(ways.items())
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="13">
<title>The loss of one model, trained on 1, 2 and 3 processes: DDP has three lines, lanewise one</title>
<style>text {{ font-family: system-ui; fill: #1b1f24 }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} }}</style>
{panels}
</svg>
"""


def panel(number: int, title: str, runs: Sequence[Sequence[float]], least: float, most: float) -> str:
    """Draw a way below its title."""
    left, top = MARGIN + number * (WIDTH + MARGIN), MARGIN

    def height_of(loss: float) -> float:
        return top + HEIGHT * (most - loss) / (most - least)

    drawn = [
        f'<text x="{left}" y="{top - 14}" font-weight="600">{title}</text>',
        f'<path d="M{left} {top}V{top + HEIGHT}H{left + WIDTH}" fill="none" stroke="#8c959f"/>',
        f'<text x="{left + WIDTH}" y="{top + HEIGHT + 18}" text-anchor="end">epoch {NUM_EPOCHS}</text>',
    ]
    drawn += [
        f'<text x="{left - 6}" y="{height_of(loss) + 4:.1f}" text-anchor="end">{loss:.1f}</text>'
        for loss in (least, most)
    ]
    for place, (num, losses) in enumerate(zip(PROCESSES, runs, strict=True)):
        points = " ".join(
            f"{left + WIDTH * epoch / (NUM_EPOCHS - 1):.1f},{height_of(loss):.1f}"
            for epoch, loss in enumerate(losses)
        )
        line = f'fill="none" stroke="{COLORS[place]}" stroke-width="{STROKES[place]}"'
        y = top + 20 * place + 12
        drawn += [
            f'<polyline points="{points}" {line}/>',
            f'<path d="M{left + WIDTH - 120} {y - 4}h24" {line}/>',
            f'<text x="{left + WIDTH - 88}" y="{y}">{num} process{"es" if num > 1 else ""}</text>',
        ]
    return "\n".join(drawn)


if __name__ == "__main__":
    print(draw(measure()), end="")
