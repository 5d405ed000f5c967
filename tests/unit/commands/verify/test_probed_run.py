"""What probes work on stays as it was built, whatever a forward does."""

import torch

from lanewise.commands.verify.probed_run import ProbedRun
from tests.distributed.tasks import configure
from tests.distributed.test_between_lanes import Teaching


def test_a_run_leaves_weights_and_buffers_as_they_were():
    """A buffer that grows in the first forward could not be copied back."""
    probed = ProbedRun(configure(Teaching, num_lanes=8, steps=4), torch.device("cpu"))
    before = {name: value.clone() for name, value in probed.tensors().items()}
    batch = probed.read()
    assert probed.run(probed.turn, batch) == probed.run(probed.turn, batch)
    after = probed.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
