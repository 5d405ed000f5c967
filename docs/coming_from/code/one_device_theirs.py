"""A training script for one device."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from toy import Net, test_data, train_data

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train_loader = DataLoader(train_data, batch_size=64, shuffle=True)
test_loader = DataLoader(test_data, batch_size=64)

for epoch in range(3):
    model.train()
    for inputs, labels in train_loader:
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits, labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    num_right = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            predicted = model(inputs.to(device)).argmax(1)
            num_right += (predicted == labels.to(device)).sum().item()
    print(f"epoch {epoch}: accuracy {num_right / len(test_data):.3f}")

torch.save(model.state_dict(), "model.pt")
