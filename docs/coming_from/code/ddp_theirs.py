"""Data parallel training by hand: `torchrun --nproc-per-node 2 ddp_theirs.py`."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from toy import Net, test_data, train_data

has_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
torch.manual_seed(0)  # equal weights on all ranks ...
model = DistributedDataParallel(Net().to(device))
torch.manual_seed(1 + rank)  # ... and a dropout of its own on each
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

sampler = DistributedSampler(train_data, seed=0)
loader = DataLoader(train_data, batch_size=16, sampler=sampler)
test_sampler = DistributedSampler(test_data, shuffle=False)
test_loader = DataLoader(test_data, batch_size=16, sampler=test_sampler)
accumulation_steps = 64 // (16 * world_size)

for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for i, (inputs, labels) in enumerate(loader):
        is_last = (i + 1) % accumulation_steps == 0 or i + 1 == len(loader)
        with nullcontext() if is_last else model.no_sync():
            logits = model(inputs.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
            (loss / accumulation_steps).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for inputs, labels in test_loader:
            predicted = model(inputs.to(device)).argmax(1)
            num_right = (predicted == labels.to(device)).sum()
            counts += torch.stack([num_right, torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"accuracy {counts[0] / counts[1]:.3f} over {counts[1]:.0f} samples")

if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
