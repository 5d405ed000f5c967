"""DDP where each process sees its own negatives alone: `torchrun --nproc-per-node 2 per_device.py FILE`."""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from simclr import ConvNet, load_digits, nt_xent, random_views
from torch.nn.parallel import DistributedDataParallel

NUM_EPOCHS, BATCH_SIZE = 40, 256

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images, _ = load_digits(held_out=False)
model = DistributedDataParallel(ConvNet(width=128))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
num_steps = NUM_EPOCHS * -(-len(images) // BATCH_SIZE)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
order = torch.Generator().manual_seed(0)  # the same on every process
torch.manual_seed(rank)  # other views on each
for _epoch in range(NUM_EPOCHS):
    for chosen in torch.randperm(len(images), generator=order).split(BATCH_SIZE):
        own = images[chosen[rank::world_size]]
        first, second = model(torch.cat([random_views(own), random_views(own)])).chunk(2)
        optimizer.zero_grad()
        nt_xent(first, second, temperature=0.2).backward()
        optimizer.step()
        scheduler.step()
if rank == 0:
    save_model(model.module, sys.argv[1])
dist.destroy_process_group()
