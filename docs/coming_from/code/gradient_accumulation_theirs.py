"""Gradient accumulation by hand: four micro-batches of 16 make a batch of 64."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from toy import Net, train_data

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=9)
loader = DataLoader(train_data, batch_size=16, shuffle=True)
accumulation_steps = 4

for _ in range(3):
    for i, (inputs, labels) in enumerate(loader):
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits, labels.to(device))
        loss = loss / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

torch.save(model.state_dict(), "model.pt")
