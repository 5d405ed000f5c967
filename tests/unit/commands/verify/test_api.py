"""`lanewise.verify` with a task that is an object."""

from tests.script import run_script

SCRIPT = '''
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lanewise

SECTIONS = {
    "batch": {"global_batch_size": 8, "micro_batch_size": 4},
    "train": {"epochs": 1, "run_dir": "nothing is written there"},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    "distributed": {"equality": "exact"},
}


class Line(lanewise.Task):
    """Its samples are in no file, so that it can only be sent to the processes."""

    def __init__(self, samples, *, reads_world):
        self.samples, self.reads_world = samples, reads_world

    def build_model(self):
        return nn.Linear(3, 1)

    def train_dataset(self):
        return TensorDataset(self.samples)

    def forward(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        factor = 2 if self.reads_world and dist.is_initialized() else 1
        return outputs.square().mean() * factor


samples = torch.arange(48.0).reshape(16, 3) / 48
for reads_world in (False, True):
    report = lanewise.verify(Line(samples, reads_world=reads_world), num_steps=2, **SECTIONS)
    print(report.is_verified)
    print(report)
    print("===")
'''


def test_a_task_that_is_an_object_is_proved_or_the_cause_is_named(tmp_path):
    """In a script, which is forked: its workers find the servers of other environments that tests share."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    proved, named, _ = run_script(script, cwd=tmp_path).split("===\n")
    assert proved.startswith("True\nsteps ")
    assert "depends on the rank" not in proved
    assert named.startswith("False\nsteps ")
    assert "depends on the rank" in named
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "stdout"}
