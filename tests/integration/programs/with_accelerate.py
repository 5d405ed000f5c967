"""A script for Accelerate, right or with a mistake that public scripts have."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--fault", default="")
given = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=given.accumulate, cpu=True)
set_seed(0)
lengths = torch.randint(2, 13, (70,))
targets = torch.randint(0, 4, (70, 12)).masked_fill(torch.arange(12) >= lengths[:, None], -100)
data = TensorDataset(torch.randn(70, 12, 5), targets)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(data, batch_size=given.rows, shuffle=True)
eval_loader = DataLoader(data, batch_size=given.rows)
if given.fault == "not_prepared":  # the loader, which each process then reads as a whole
    model, optimizer, eval_loader, scheduler = accelerator.prepare(model, optimizer, eval_loader, scheduler)
else:
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
for _ in range(3):
    for rows, wanted in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows).flatten(0, 1), wanted.flatten(), reduction="sum")
            count = (wanted != -100).sum()
            if given.fault == "token_mean":
                loss = loss / count
            else:  # of all processes; what Accelerate averages is a sum, so it is multiplied
                loss = loss * accelerator.num_processes / accelerator.reduce(count, "sum")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    hits = []
    for rows, wanted in eval_loader:
        with torch.no_grad():
            found = model(rows).argmax(-1) == wanted
        gather = accelerator.gather if given.fault == "padded" else accelerator.gather_for_metrics
        hits.append(gather(found))
    accelerator.print(f"accuracy of {len(torch.cat(hits))} samples: {torch.cat(hits).float().mean():.4f}")
