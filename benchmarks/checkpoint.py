"""How long a save stops the training loop.

    python benchmarks/checkpoint.py

A model of 100 million parameters with AdamW: 1.2 GB of state, one process. `copy` is a plain copy of the
state into memory that was touched before: no save can stop the loop for less. DCP is
`torch.distributed.checkpoint`. lanewise goes on writing in the background; "later" is what steps of a matrix
product lose meanwhile.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from section import publish, ratios, spread, table
from sides import installed
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lanewise.engine.state.run_state import take_optimizer
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver

Way = Callable[[], object]
WIDTH, NUM_LAYERS = 3162, 10


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    folder = Path(tempfile.mkdtemp())
    try:
        train_step(model, optimizer)
        saver = Saver(
            CheckpointFolder(folder / "lanewise"),
            LocalWorld(torch.device("cpu")),
            keep_last=1,
            keep_best=0,
            sign=1,
        )
        ways = plain_ways(model, optimizer, folder) | {"lanewise": lanewise(model, optimizer, saver)}
        for name in installed(LIBRARIES):
            ways[name] = LIBRARIES[name](model, optimizer, folder / name)
        rows = compare(ways, saver, num_rounds)
        for name in ways.keys() - {"copy"}:
            files = [folder / name, *(folder / name).rglob("*")]
            written = sum(file.stat().st_size for file in files if file.is_file())
            if written < 3 * 4 * NUM_LAYERS * WIDTH**2:
                raise SystemExit(f"{name} has written {written:,} bytes only")
        yield rows
    finally:
        shutil.rmtree(folder)


def compare(ways: dict[str, Way], saver: Saver, num_rounds: int) -> str:
    """Let the ways take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    later = []
    for _ in range(num_rounds + 1):
        for name, save in ways.items():
            os.sync()
            start = time.perf_counter()
            save()
            seconds[name].append(time.perf_counter() - start)
            if name == "lanewise":
                later.append(lose(saver))
    rows = [
        [
            name,
            spread(times[1:]),  # the first round warms up
            spread(ratios(times[1:], seconds["copy"][1:])),
            spread(later[1:]) if name == "lanewise" else "",
        ]
        for name, times in seconds.items()
    ]
    return table(["way", "seconds", "time / copy", "later, seconds"], rows)


def lose(saver: Saver) -> float:
    """Return how much longer steps take while a save is written than afterwards."""
    matrix = torch.ones(400, 400)
    start, num_steps = time.perf_counter(), 0
    while not saver.finish(timeout_seconds=0):
        matrix @ matrix
        num_steps += 1
    spent = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(num_steps):
        matrix @ matrix
    return spent - (time.perf_counter() - start)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its state."""
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()


def plain_ways(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Way]:
    """Return those of torch, and the copy."""
    tensors = list(model.state_dict().values())
    tensors += [value for values in optimizer.state.values() for value in values.values()]
    touched = [torch.empty_like(tensor).fill_(1) for tensor in tensors]

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def copy() -> None:
        for target, tensor in zip(touched, tensors, strict=True):
            target.copy_(tensor)

    return {
        "copy": copy,
        "torch.save": lambda: torch.save(state(), folder / "torch.save"),
        "DCP save": lambda: dcp_save(state(), checkpoint_id=folder / "DCP save", no_dist=True),
    }


def lanewise(model: nn.Module, optimizer: torch.optim.Optimizer, saver: Saver) -> Way:
    """As `lanewise train` saves."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    steps = iter(range(10**6))

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": take_optimizer(optimizer, names)}
        saver.save(state, Manifest(step=next(steps), metric=None, identity={}, files=()))

    return save


def fabric(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Way:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    return lambda: fabric.save(folder, {"model": model, "optimizer": optimizer})


def ignite(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Way:
    """PyTorch Ignite."""
    from ignite.engine import Engine
    from ignite.handlers import Checkpoint, DiskSaver

    objects = {"model": model, "optimizer": optimizer}
    checkpoint = Checkpoint(objects, DiskSaver(str(folder), create_dir=True), n_saved=1)
    trainer = Engine(lambda *_: None)
    steps = iter(range(1, 10**6))

    def save() -> None:
        trainer.state.iteration = next(steps)
        checkpoint(trainer)

    return save


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Way:
    """Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    return lambda: accelerator.save_state(str(folder))


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Way:
    """The Lightning Trainer, after a run of one step."""
    from lightning import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.ones(1, 1, WIDTH))
    return lambda: trainer.save_checkpoint(folder / "last.ckpt")


def hugging_face(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Way:
    """The HF Trainer, after a run of one step."""
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(batch).sum()}

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=1,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    module = WithLoss()
    trainer = Trainer(
        model=module,
        args=arguments,
        train_dataset=[{"batch": torch.ones(WIDTH)}],
        optimizers=(optimizer, None),
    )
    trainer.train()
    return lambda: trainer._save_checkpoint(module, None)  # noqa: SLF001 - what its loop calls


LIBRARIES: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Path], Way]] = {
    "Fabric": fabric,
    "Ignite": ignite,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer": hugging_face,
}
"""By the name in the table: what builds the way to save."""


if __name__ == "__main__":
    publish("What a save costs the loop", __doc__, measure, num_rounds=4)
