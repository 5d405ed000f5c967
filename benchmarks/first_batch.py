"""Each side's training up to one batch, from the checkpoint in the working directory or from the beginning.

    python benchmarks/first_batch.py SIDE NUM_SAMPLES STEP

The sides resume as their documentation says. Without a checkpoint, one is saved after STEP steps, and the
batch after it is the last one; with one, the first batch is the last one. Printed, as JSON, are the first
samples of the last batch, the seconds until it came, with everything built, and the MiB of memory that were
needed for it.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 100
NEVER = 10**12


class Numbers(Dataset[torch.Tensor]):
    """Samples that are their own index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """Return one whole batch."""
        return [torch.tensor(indices, dtype=torch.float64)]


class Witness(nn.Module):
    """A model of one weight that ends the process when it sees the batch that it was to wait for.

    Args:
        num_before: how many batches come before it.
    """

    def __init__(self, num_before: int) -> None:
        super().__init__()
        self.num_before = num_before
        self.num_seen = 0
        self.weight = nn.Parameter(torch.ones(1))
        self.begin()

    def begin(self) -> None:
        """Note that training begins now."""
        self.start, self.start_kib = time.perf_counter(), peak_kib()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return some loss."""
        if self.num_seen == self.num_before:
            seconds = time.perf_counter() - self.start
            mebibytes = (peak_kib() - self.start_kib) / 1024
            print(json.dumps([batch[:5].tolist(), seconds, mebibytes]), flush=True)
            os._exit(0)
        self.num_seen += 1
        return (self.weight * batch.float().mean() / 1e9).square().sum()


def peak_kib() -> int:
    """Return the largest amount of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def collate(batches: list[torch.Tensor]) -> torch.Tensor:
    """Pass a batch on."""
    return batches[0]


def build_loader(num_samples: int, num_workers: int = 0) -> "DataLoader[torch.Tensor]":
    """Return the loader that a user writes."""
    dataset = Numbers(num_samples)
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, collate_fn=collate, num_workers=num_workers)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def hand_written(model: Witness, num_samples: int, save_step: int) -> None:
    """An order from a seed, of which the sampler gets the rest."""
    file, first_step = Path("state.pt"), 0
    dataset, optimizer = Numbers(num_samples), build_optimizer(model)
    model.begin()
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))
    rest = order[first_step * BATCH_SIZE :].tolist()
    loader = DataLoader(dataset, BATCH_SIZE, sampler=rest, collate_fn=collate)
    for step, batch in enumerate(loader, start=first_step + 1):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == save_step:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, file)


def lanewise(model: Witness, num_samples: int, save_step: int) -> None:
    """The same loop over `lanewise.Lanes`."""
    from lanewise import Lanes

    lanes = Lanes(global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE)
    lanes.prepare(model)
    dataset, optimizer = Numbers(num_samples), build_optimizer(model)
    model.begin()
    checkpoints = lanes.checkpoints("checkpoints", model=model, optimizer=optimizer)
    for step in lanes.steps(dataset, collate=collate, first_step=checkpoints.step):
        for batch in step:
            step.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
        if step.number + 1 == save_step:
            checkpoints.save(save_step)
            checkpoints.finish()


def fabric(model: Witness, num_samples: int, save_step: int) -> None:
    """Fabric loads a state; what was trained on is passed over."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    module, optimizer = fabric.setup(model, build_optimizer(model))
    loader = fabric.setup_dataloaders(build_loader(num_samples))
    state = {"model": module, "optimizer": optimizer, "step": 0}
    model.begin()
    if Path("state.ckpt").exists():
        fabric.load("state.ckpt", state)
    first_step = state["step"]
    for step, batch in enumerate(loader, start=1):
        if step <= first_step:
            continue
        fabric.backward(module(batch))
        optimizer.step()
        optimizer.zero_grad()
        if step == save_step:
            state["step"] = step
            fabric.save("state.ckpt", state)


def ignite(model: Witness, num_samples: int, save_step: int) -> None:
    """Ignite's engine for runs that are resumed, which goes on with the next batch only if workers read."""
    from ignite.engine import DeterministicEngine, Events

    optimizer, loader = build_optimizer(model), build_loader(num_samples, num_workers=2)

    def train_step(_: Any, batch: Any) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    trainer = DeterministicEngine(train_step)
    objects = {"trainer": trainer, "model": model, "optimizer": optimizer}

    @trainer.on(Events.ITERATION_COMPLETED(once=save_step))  # type: ignore[untyped-decorator]
    def save() -> None:
        torch.save({name: one.state_dict() for name, one in objects.items()}, "state.pt")

    model.begin()
    if Path("state.pt").exists():
        state = torch.load("state.pt", weights_only=False)
        for name, one in objects.items():
            one.load_state_dict(state[name])
    trainer.run(loader, max_epochs=1)


def accelerate(model: Witness, num_samples: int, save_step: int) -> None:
    """Accelerate skips the first batches of the epoch's order."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    )
    module, optimizer, loader = accelerator.prepare(model, build_optimizer(model), build_loader(num_samples))
    model.begin()
    first_step = 0
    if Path("state").exists():
        accelerator.load_state("state")
        first_step = json.loads(Path("step.json").read_text())
        loader = accelerator.skip_first_batches(loader, first_step)
    for step, batch in enumerate(loader, start=first_step + 1):
        accelerator.backward(module(batch))
        optimizer.step()
        optimizer.zero_grad()
        if step == save_step:
            accelerator.save_state("state")
            Path("step.json").write_text(json.dumps(step))


def lightning(model: Witness, num_samples: int, save_step: int) -> None:
    """The Lightning Trainer, with its checkpoint callback."""
    from lightning import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self.model)

    seed_everything(0)
    saves = ModelCheckpoint(dirpath="state", save_last=True, every_n_train_steps=save_step)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
    )
    module, loader = Module(), build_loader(num_samples)
    model.begin()
    trainer.fit(module, loader, ckpt_path="state/last.ckpt" if Path("state").exists() else None)


def hugging_face(model: Witness, num_samples: int, save_step: int) -> None:
    """The HF Trainer."""
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(batch)}

    def as_arguments(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"batch": batches[0]}

    module = WithLoss()
    trainer = Trainer(
        model=module,
        args=TrainingArguments(
            output_dir="state",
            use_cpu=True,
            per_device_train_batch_size=BATCH_SIZE,
            num_train_epochs=1,
            save_steps=save_step,
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=Numbers(num_samples),
        data_collator=as_arguments,
        optimizers=(build_optimizer(module), None),
    )
    model.begin()
    trainer.train(resume_from_checkpoint=any(Path("state").glob("checkpoint-*")))


SIDES: dict[str, Callable[[Witness, int, int], None]] = {
    "hand-written": hand_written,
    "lanewise": lanewise,
    "Fabric": fabric,
    "Ignite": ignite,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer": hugging_face,
}
"""By the name in the tables."""


def run(side: str, num_samples: int, step: int, folder: Path) -> tuple[list[float], float, float]:
    """Start a side in a folder; return what it prints."""
    command = [sys.executable, __file__, side, str(num_samples), str(step)]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-5000:]}")
    samples, seconds, mebibytes = json.loads(done.stdout.splitlines()[-1])
    return samples, seconds, mebibytes


def main(side: str, num_samples: str, step: str) -> None:
    """Train up to the batch."""
    num_before = 0 if any(Path().iterdir()) else int(step)
    SIDES[side](Witness(num_before), int(num_samples), int(step) or NEVER)
    raise SystemExit(f"{side} never came to the batch after {step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:4])
