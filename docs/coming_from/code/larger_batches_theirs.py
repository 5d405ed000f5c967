"""A batch of 64 where 16 fit: accumulation, with activations that are computed twice."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader
from toy import Net, test_data, train_data

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(train_data, batch_size=16, shuffle=True)
test_loader = DataLoader(test_data, batch_size=16)
accumulation_steps = 4

model.zero_grad()  # reset gradients tensors
for i, (inputs, labels) in enumerate(loader):
    predictions = checkpoint_sequential(model.layers, 2, inputs.to(device), use_reentrant=False)
    loss = F.cross_entropy(predictions, labels.to(device))
    loss = loss / accumulation_steps  # normalize our loss (if averaged)
    loss.backward()
    if (i + 1) % accumulation_steps == 0:  # wait for several backward steps
        optimizer.step()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [nn.CrossEntropyLoss()(model(x.to(device)), y.to(device)) for x, y in test_loader]
        print(f"step {(i + 1) // accumulation_steps}: loss {torch.stack(losses).mean():.4f}")
        model.train()

torch.save(model.state_dict(), "model.pt")
