"""One process that drives all GPUs of a machine; without a GPU it is the plain module."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from toy import Net, train_data

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.DataParallel(Net().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(train_data, batch_size=64, shuffle=True)

for _ in range(3):
    for inputs, labels in loader:
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits, labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.module.state_dict(), "model.pt")
