"""The LightningModule of lightning_theirs.py, trained on two processes: `python lightning_module_ours.py`."""

import torch
from lightning_theirs import Points
from torch.utils.data import DataLoader
from toy import test_data, train_data

import lanewise.lightning

torch.manual_seed(0)  # the weights are those of the module that you build
module = Points()
result = lanewise.lightning.train(
    module,
    DataLoader(train_data, batch_size=16, shuffle=True),
    DataLoader(test_data, batch_size=16),
    batch={"global_batch_size": 64},
    train={"epochs": 3, "seed": 0, "max_grad_norm": 1.0, "run_dir": "runs/points"},
    distributed={"devices": 2, "equality": "exact"},
)
print(result.evaluation)
