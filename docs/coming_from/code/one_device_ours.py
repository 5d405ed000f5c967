"""The script for one device, which now runs on any number of them."""

import torch
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from toy import Net, test_data, train_data

import lanewise

lanes = lanewise.Lanes(global_batch_size=64, micro_batch_size=16, seed=0, equality="exact")
model = lanes.prepare(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train_steps = lanes.steps(train_data)

for epoch in range(3):
    model.train()
    for step in train_steps:
        for inputs, labels in step:
            loss = F.cross_entropy(model(inputs), labels)
            step.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    accuracy = MulticlassAccuracy(3, average="micro")
    with torch.no_grad():
        for inputs, labels in lanes.evaluate(test_data, accuracy):
            accuracy.update(model(inputs), labels)
    lanes.print(f"epoch {epoch}: accuracy {accuracy.compute():.3f}")

lanes.save_model(model, "model.safetensors")
