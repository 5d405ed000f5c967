"""The same training, under `torchrun` or plain `python`."""

import torch
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from toy import Net, test_data, train_data

import lanewise

lanes = lanewise.Lanes(global_batch_size=64, micro_batch_size=16, seed=0, equality="exact")
model = lanes.prepare(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = lanes.steps(train_data)

for _ in range(3):
    model.train()
    for step in steps:
        for inputs, labels in step:
            loss = F.cross_entropy(model(inputs), labels)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    accuracy = MulticlassAccuracy(3, average="micro")
    with torch.no_grad():
        for inputs, labels in lanes.evaluate(test_data, accuracy):
            accuracy.update(model(inputs), labels)
    lanes.print(f"accuracy {accuracy.compute():.3f} over {len(test_data)} samples")

lanes.save_model(model, "model.safetensors")
