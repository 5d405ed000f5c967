"""Mixed precision in fp16, on any number of devices."""

import torch
from torch.nn import functional as F
from toy import Net, train_data

import lanewise

lanes = lanewise.Lanes(
    global_batch_size=64,
    micro_batch_size=16,
    seed=0,
    precision="fp16",
    equality="exact",
)
model = lanes.prepare(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = lanes.steps(train_data)

for _ in range(3):
    for step in steps:
        for inputs, labels in step:
            with lanes.autocast():
                loss = F.cross_entropy(model(inputs), labels)
            step.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

lanes.save_model(model, "model.safetensors")
