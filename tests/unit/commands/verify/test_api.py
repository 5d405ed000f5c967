"""`lanewise.verify` with a task that is an object."""

import pytest

from tests.script import run_script
from tests.slow import slow

SCRIPT = '''
import sys

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
report = lanewise.verify(Line(samples, reads_world=sys.argv[1] == "True"), num_steps=2, **SECTIONS)
print(report.is_verified)
print(report)
'''


@pytest.mark.parametrize("is_wrong", [True, *slow(False)])
def test_a_task_that_is_an_object_is_proved_or_the_cause_is_named(tmp_path, is_wrong):
    """In a script, which is forked: its workers find the servers of other environments that tests share."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    said = run_script(script, is_wrong, cwd=tmp_path)
    assert said.startswith(f"{not is_wrong}\nsteps ")
    assert ("depends on the rank" in said) == is_wrong
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "stdout"}
