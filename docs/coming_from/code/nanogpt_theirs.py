"""A loop in nanoGPT's way: `python` runs it on one device, `torchrun` on several."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from nanogpt_model import GPT
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

gradient_accumulation_steps, batch_size, block_size = 4, 12, 32
max_iters, eval_interval, eval_iters, grad_clip = 60, 20, 20, 1.0
device, master_process, seed_offset = "cuda" if torch.cuda.is_available() else "cpu", True, 0
ddp = int(os.environ.get("RANK", "-1")) != -1  # is this a ddp run?
if ddp:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    seed_offset, world_size = dist.get_rank(), dist.get_world_size()  # each process gets a different seed
    master_process = seed_offset == 0
    device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
torch.manual_seed(1337 + seed_offset)


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and targets."""
    data = np.memmap(f"data/chars/{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


def get_loss(split: str) -> torch.Tensor:
    """Return the mean loss of a batch."""
    x, y = get_batch(split)
    logits = model(x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


vocab_size = json.loads(Path("data/chars/meta.json").read_text())["vocab_size"]
raw_model = GPT(vocab_size, block_size).to(device)
model = DistributedDataParallel(raw_model) if ddp else raw_model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
for iter_num in range(1, max_iters + 1):
    for micro_step in range(gradient_accumulation_steps):
        is_last = micro_step == gradient_accumulation_steps - 1
        with nullcontext() if is_last or not ddp else model.no_sync():
            loss = get_loss("train") / gradient_accumulation_steps
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % eval_interval == 0 and master_process:
        raw_model.eval()
        with torch.no_grad():
            val_loss = torch.stack([get_loss("val") for _ in range(eval_iters)]).mean()
        raw_model.train()
        print(f"step {iter_num}: val loss {val_loss:.4f}")
if master_process:
    torch.save(raw_model.state_dict(), "ckpt.pt")
if ddp:
    dist.destroy_process_group()
