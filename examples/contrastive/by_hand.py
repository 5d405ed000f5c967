"""The goal: the same by hand on one device, each step in one graph: `python by_hand.py FILE [SEED]`."""

import sys

import torch
from safetensors.torch import save_model
from simclr import ConvNet, load_digits, nt_xent, random_views

NUM_EPOCHS, BATCH_SIZE = 40, 256

file, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
torch.manual_seed(seed)
images, _ = load_digits(held_out=False)
model = ConvNet(width=128)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
num_steps = NUM_EPOCHS * -(-len(images) // BATCH_SIZE)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
for _epoch in range(NUM_EPOCHS):
    for chosen in torch.randperm(len(images)).split(BATCH_SIZE):
        views = torch.cat([random_views(images[chosen]), random_views(images[chosen])])
        first, second = model(views).chunk(2)
        optimizer.zero_grad()
        nt_xent(first, second, temperature=0.2).backward()
        optimizer.step()
        scheduler.step()
save_model(model, file)
