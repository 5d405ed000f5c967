"""Accelerate: `accelerate launch --num_processes 2 accelerate_theirs.py`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader
from toy import Net, test_data, train_data

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
loader = DataLoader(train_data, batch_size=16, shuffle=True)
test_loader = DataLoader(test_data, batch_size=16)
model, optimizer, scheduler, loader, test_loader = accelerator.prepare(
    model, optimizer, scheduler, loader, test_loader
)

for _ in range(3):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    num_right = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            predicted = model(inputs).argmax(1)
            both = accelerator.gather_for_metrics((predicted, labels))
            num_right += (both[0] == both[1]).sum().item()
    accelerator.print(f"accuracy {num_right / len(test_data):.3f}")

accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
