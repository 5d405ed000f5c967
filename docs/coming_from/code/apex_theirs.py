"""Mixed precision with apex.amp, which needs a GPU."""

import torch
from apex import amp
from torch.nn import functional as F
from torch.utils.data import DataLoader
from toy import Net, train_data

torch.manual_seed(0)
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
loader = DataLoader(train_data, batch_size=64, shuffle=True)

for _ in range(3):
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs.cuda()), labels.cuda())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()

torch.save(model.state_dict(), "model.pt")
