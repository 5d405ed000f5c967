"""What --dry-run says of the launcher ray, which needs no Ray for it."""

import dataclasses
import sys

import pytest

from lanewise.commands.jobs.launchers import launcher_of
from lanewise.commands.jobs.train import TrainJob
from lanewise.config import DataConfig, DistributedConfig
from tests.distributed.tasks import Smooth, configure


def described(num_workers: int = 0, **distributed: object) -> str:
    config = dataclasses.replace(
        configure(Smooth),
        distributed=DistributedConfig(launcher="ray", **distributed),
        data=DataConfig(num_workers=num_workers),
    )
    return launcher_of(TrainJob(config)).describe()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # to import it is an error


def test_several_nodes_have_a_bundle_each_on_different_ones():
    text = described(nodes=2, devices=2, device_type="cpu", num_workers=1)
    assert text.startswith("a placement group of 2 bundles of CPU 4, STRICT_SPREAD; in each an actor with 2 ")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"device_type": "cuda", "devices": 4}, "1 bundle of CPU 4 and GPU 4, PACK; "),
        ({"devices": ("cuda:0", "cuda:1")}, "1 bundle of CPU 2 and GPU 2, PACK; "),
        ({"device_type": "cpu"}, "1 bundle of CPU 1, PACK; "),
        ({"devices": 2}, "1 bundle of CPU 2, PACK, and with GPU 2 if the cluster has GPUs; "),
    ],
)
def test_a_bundle_has_the_gpus_that_are_asked_for(keys, says):
    assert says in described(**keys)
