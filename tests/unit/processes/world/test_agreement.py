"""What the processes of a world say where their machines differ."""

import pytest
import torch

from lanewise.errors import WorldError
from lanewise.processes.device.determinism import exact_pins
from lanewise.processes.world.agreement import require_equal_machines


class Others:
    """A world in which further ranks are on another host, with pins of their own."""

    def __init__(self, *changes: dict[str, str]) -> None:
        self.device = torch.device("cpu")
        self._changes = changes

    def all_gather_tree(self, value):
        host, pins = value
        return [[host, pins], *(["node1", pins | change] for change in self._changes)]


def test_equal_machines_agree():
    require_equal_machines(Others({}, {}))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("torch", "Install the same version of torch"),
        ("cpu_capability", "same kind of CPU"),
        ("onednn", "set ONEDNN_MAX_CPU_ISA on all of them"),
        ("gpu", "same model of GPU"),
        ("threads", "the same distributed.threads"),
    ],
)
def test_the_rank_that_differs_from_rank_0_is_named_with_both_values_and_a_remedy(name, remedy):
    ours = (exact_pins(torch.device("cpu")) | {"threads": str(torch.get_num_threads())}).get(name, "none")
    with pytest.raises(WorldError) as caught:
        require_equal_machines(Others({}, {name: "another"}))
    said = str(caught.value)
    assert f"got {name}=another of rank 2 on node1, and {name}={ours} of rank 0 on " in said
    assert remedy in said


def test_all_that_differs_is_named():
    with pytest.raises(WorldError, match=r"got torch=1\.0, threads=7 of rank 1 on node1, and torch=2"):
        require_equal_machines(Others({"torch": "1.0", "threads": "7"}))
