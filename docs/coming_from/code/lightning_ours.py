"""The task and its training from Python, which starts two processes: `python lightning_ours.py`."""

from points import Points

import lanewise

result = lanewise.train(
    Points(),
    batch={"global_batch_size": 64, "micro_batch_size": 16},
    train={"epochs": 3, "seed": 0, "max_grad_norm": 1.0, "run_dir": "runs/from-python"},
    optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
    scheduler={
        "class_path": "torch.optim.lr_scheduler.LinearLR",
        "init_args": {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 12},
    },
    evaluate={"best": "test/accuracy"},
    distributed={"devices": 2, "equality": "exact"},
)
print(result.evaluation)
