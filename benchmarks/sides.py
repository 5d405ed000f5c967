"""Each side's training of a workload, as its documentation recommends; one side runs in a process of its own.

    python benchmarks/sides.py SIDE WORKLOAD SIZES [FILE NUM_SAMPLES]

On several processes each one has torchrun's variables in its environment, and gloo connects them; without
these it is a plain program. SIZES are the fields of the workload, as JSON. FILE is a pipe to those who say
whose turn it is, NUM_SAMPLES the length of a turn.
"""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import turn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from workload import WORKLOADS, Workload

WORLD_SIZE, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def hand_written(work: Workload) -> nn.Module:
    """A loop in plain PyTorch, with DistributedDataParallel on several processes."""
    return _hand_written_ddp(work) if WORLD_SIZE > 1 else _hand_written_alone(work)


def _hand_written_alone(work: Workload) -> nn.Module:
    model = work.build_model()
    optimizer = work.build_optimizer(model)
    num_micro_batches = work.num_micro_batches
    for number, batch in enumerate(work.batches(0, 1), start=1):
        loss = work.loss(model, batch)
        (loss if num_micro_batches == 1 else loss / num_micro_batches).backward()
        if number % num_micro_batches == 0:
            if work.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model


def _hand_written_ddp(work: Workload) -> nn.Module:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.build_model(), gradient_as_bucket_view=True)
    optimizer = work.build_optimizer(model)
    num_micro_batches = work.num_micro_batches // WORLD_SIZE
    for number, batch in enumerate(work.batches(RANK, WORLD_SIZE), start=1):
        is_last = number % num_micro_batches == 0
        with nullcontext() if is_last else model.no_sync():
            (work.loss(model, batch) / num_micro_batches).backward()
        if is_last:
            if work.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model


def lanewise_train(work: Workload) -> nn.Module:
    """`lanewise train` with all its defaults: it shows progress, and writes metrics and checkpoints."""
    from safetensors.torch import load_model

    from lanewise.cli.main import main as lanewise

    config = Path(f"work-{RANK}.json")
    config.write_text(json.dumps(lanewise_config(work)))
    if lanewise(["train", str(config)]) != 0:
        raise SystemExit(1)
    model = work.build_model()
    load_model(model, "run/model.safetensors")
    return model


def lanewise_steps(work: Workload) -> nn.Module:
    """The steps of `lanewise train`, in the same kind of process, without loggers and checkpoints."""
    from task import Work

    from lanewise.commands.jobs.job import Job
    from lanewise.commands.jobs.start import start
    from lanewise.config import RunConfig
    from lanewise.config.check import read_section
    from lanewise.engine.engine import build_engine

    class Steps(Job):
        def run(self, world: Any) -> nn.Module:
            engine = build_engine(self.config, world, self.task)
            deque(engine.steps(), maxlen=0)
            return engine.training.model

    config = read_section(RunConfig, lanewise_config(work))
    model: nn.Module = start(Steps(config, Work(work.name, asdict(work))), is_fresh=False)
    return model


def lanewise_config(work: Workload) -> dict[str, Any]:
    """Return the configuration of a workload."""
    return {
        "task": {"class_path": "task.Work", "init_args": {"name": work.name, "sizes": asdict(work)}},
        "batch": {"global_batch_size": work.global_batch_size, "micro_batch_size": work.micro_batch_size},
        "train": {"epochs": 1, "run_dir": "run", "max_grad_norm": work.max_grad_norm},
        "optimizer": {
            "class_path": f"torch.optim.{work.optimizer.__name__}",
            "init_args": work.optimizer_options,
        },
        "data": {"order": "shuffled" if work.shuffle else "sequential"},
        "distributed": {"equality": work.equality},
        "search_path": str(Path(__file__).parent),
    }


def lanewise_lanes(work: Workload) -> nn.Module:
    """A loop of one's own over `lanewise.Lanes`."""
    from lanewise import Lanes

    lanes = Lanes(
        global_batch_size=work.global_batch_size,
        micro_batch_size=work.micro_batch_size,
        equality=work.equality,
    )
    model = lanes.prepare(work.build_model())
    optimizer = work.build_optimizer(model)
    for step in lanes.steps(
        work.dataset(), collate=work.collate, order="shuffled" if work.shuffle else "sequential"
    ):
        for batch in step:
            step.backward(work.loss(model, batch))
        if work.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


def fabric(work: Workload) -> nn.Module:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy="ddp" if WORLD_SIZE > 1 else "auto")
    fabric.launch()
    model = work.build_model()
    model, optimizer = fabric.setup(model, work.build_optimizer(model))
    num_micro_batches = work.num_micro_batches // WORLD_SIZE
    for number, batch in enumerate(fabric.setup_dataloaders(work.loader()), start=1):
        is_accumulating = number % num_micro_batches != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(work.loss(model, batch) / num_micro_batches)
        if not is_accumulating:
            if work.max_grad_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=work.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    module: nn.Module = model.module
    return module


def ignite(work: Workload) -> nn.Module:
    """PyTorch Ignite, whose engine calls a step that its user writes."""
    import ignite.distributed as idist
    from ignite.engine import Engine

    if WORLD_SIZE > 1:
        idist.initialize("gloo")
    model = idist.auto_model(work.build_model())
    optimizer = idist.auto_optim(work.build_optimizer(model))
    loader = idist.auto_dataloader(
        work.dataset(),
        batch_size=work.micro_batch_size * WORLD_SIZE,
        shuffle=work.shuffle,
        collate_fn=work.collate,
    )
    num_micro_batches = work.num_micro_batches // WORLD_SIZE

    def train_step(engine: Any, batch: Any) -> torch.Tensor:
        model.train()
        is_last = engine.state.iteration % num_micro_batches == 0
        with model.no_sync() if WORLD_SIZE > 1 and not is_last else nullcontext():
            loss = work.loss(model, batch) / num_micro_batches
            loss.backward()
        if is_last:
            if work.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    Engine(train_step).run(loader, max_epochs=1)
    module: nn.Module = model.module if WORLD_SIZE > 1 else model
    return module


def accelerate(work: Workload) -> nn.Module:
    """Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.num_micro_batches // WORLD_SIZE)
    model = work.build_model()
    model, optimizer, loader = accelerator.prepare(model, work.build_optimizer(model), work.loader())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(work.loss(model, batch))
            if work.max_grad_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), work.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    module: nn.Module = accelerator.unwrap_model(model)
    return module


def lightning(work: Workload, *, barebones: bool) -> nn.Module:
    """The Lightning Trainer, bare, or with its progress bar, logger and checkpoints."""
    from lightning import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = work.loss(self.model, batch)
            if not barebones:
                self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.build_optimizer(self.model)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_epochs=1,
        accumulate_grad_batches=work.num_micro_batches // WORLD_SIZE,
        gradient_clip_val=work.max_grad_norm,
        barebones=barebones,
    )
    trainer.fit(module, work.loader(RANK, WORLD_SIZE))  # by itself it would shuffle, whatever the loader says
    return module.model


def hugging_face(work: Workload, *, is_quiet: bool) -> nn.Module:
    """The HF Trainer, quiet, or with its progress bar, logs and checkpoints."""
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build_model()

        def forward(self, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": work.loss(self.model, batch)}

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"batch": work.collate(samples)}

    quiet: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        output_dir="run",
        use_cpu=True,
        ddp_backend="gloo" if WORLD_SIZE > 1 else None,
        per_device_train_batch_size=work.micro_batch_size,
        gradient_accumulation_steps=work.num_micro_batches // WORLD_SIZE,
        max_grad_norm=work.max_grad_norm or 0.0,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        train_sampling_strategy="random" if work.shuffle else "sequential",
        remove_unused_columns=False,
        **(quiet if is_quiet else {}),
    )
    model = WithLoss()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=work.dataset(),
        data_collator=collate,
        optimizers=(work.build_optimizer(model), None),
    )
    trainer.train()
    return model.model


SIDES: dict[str, tuple[str, Callable[[Workload], nn.Module]]] = {
    "hand-written": ("torch", hand_written),
    "lanewise": ("lanewise", lanewise_steps),
    "lanewise train": ("lanewise", lanewise_train),
    "lanewise.Lanes": ("lanewise", lanewise_lanes),
    "Fabric": ("lightning", fabric),
    "Ignite": ("ignite", ignite),
    "Accelerate": ("accelerate", accelerate),
    "Lightning": ("lightning", partial(lightning, barebones=True)),
    "HF Trainer": ("transformers accelerate", partial(hugging_face, is_quiet=True)),
    "Lightning, its defaults": ("lightning", partial(lightning, barebones=False)),
    "HF Trainer, its defaults": ("transformers accelerate", partial(hugging_face, is_quiet=False)),
}
"""By the name in the tables: the modules that the side needs, and its program."""


def installed(sides: Iterable[str]) -> list[str]:
    """Return those that can take part, and name the others."""
    sides = list(sides)
    found = [side for side in sides if all(map(find_spec, SIDES[side][0].split()))]
    if missing := [side for side in sides if side not in found]:
        print(f"not installed, and left out: {', '.join(missing)}. `make benchmarks` installs all.")
    return found


def main(side: str, name: str, sizes: str) -> None:
    """Train, and say what came of it."""
    work = WORKLOADS[name](**json.loads(sizes))
    num_updates = 0

    def count(*_: object) -> None:
        nonlocal num_updates
        num_updates += 1

    register_optimizer_step_post_hook(count)
    torch.manual_seed(0)
    model = SIDES[side][1](work)
    if dist.is_initialized():
        dist.destroy_process_group()
    if num_updates != work.num_steps:
        raise SystemExit(f"{side} took {num_updates} steps, not {work.num_steps}")
    turn.current.end([work.final_loss(one) for one in (work.build_model(), model)])


if __name__ == "__main__":
    if sys.argv[4:]:
        turn.follow(int(sys.argv[4]), int(sys.argv[5]))
    main(*sys.argv[1:4])
