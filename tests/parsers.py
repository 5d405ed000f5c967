"""Makes the parsers of what most configurations name, which each process of a run would make anew.

That reads the sources of the classes and their docstrings, for longer than the steps of a small run.
The tests' server imports this, so that its forks have them.
"""

from lanewise.config import BatchConfig, ClassConfig, OptimizerConfig, RunConfig, TrainConfig
from lanewise.config.classes import check_classes

for name in ("SGD", "Adam", "AdamW"):
    check_classes(
        RunConfig(
            task=ClassConfig(class_path="lanewise.Task"),
            batch=BatchConfig(global_batch_size=1, micro_batch_size=1),
            train=TrainConfig(run_dir="unused", max_steps=1),
            optimizer=OptimizerConfig(class_path=f"torch.optim.{name}", init_args={"lr": 0.1}),
        ),
        has_task=True,
    )
