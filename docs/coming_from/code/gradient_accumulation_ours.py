"""A global batch of 64 in micro-batches of 16; accumulation follows."""

import torch
from torch.nn import functional as F
from toy import Net, train_data

import lanewise

lanes = lanewise.Lanes(global_batch_size=64, micro_batch_size=16, seed=0, equality="exact")
model = lanes.prepare(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
steps = lanes.steps(train_data)

for _ in range(3):
    for step in steps:
        for inputs, labels in step:
            loss = F.cross_entropy(model(inputs), labels)
            step.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

lanes.save_model(model, "model.safetensors")
