"""Training, evaluating, saving and going on never unpickle what another process sent, in torch neither."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch.distributed as dist

from lanewise.commands.jobs.train import TrainJob
from lanewise.config import CompileConfig, DistributedConfig
from lanewise.processes.device.determinism import set_determinism
from lanewise.testing import run_distributed
from tests.distributed.strangers import Images
from tests.distributed.tasks import Language, Sentences, configure
from tests.slow import slow


class Evaluated(Language):
    def eval_datasets(self) -> dict[str, Any]:
        return {"all": Sentences(5)}


class EvaluatedImages(Images):
    def eval_datasets(self) -> dict[str, Any]:
        return {"all": self.train_dataset()}


def refuse(*_: object) -> None:
    raise AssertionError("torch unpickles what another process sent")


def train_and_go_on(world, config):
    set_determinism(config.distributed.equality, threads=1)
    warnings.simplefilter("ignore")  # of inductor's own imports, in this process
    dist.distributed_c10d._unpickler = refuse  # with which all of torch's collectives for objects read
    job = TrainJob(config)
    if world.rank == 0:
        job.run_dir.path.mkdir()
    world.all_gather_tree(None)
    job.run(world)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=4))
    values = TrainJob(longer, is_resumed=True).run(world)
    with pytest.raises(AssertionError, match="torch unpickles"):
        dist.all_gather_object([None] * world.world_size, values)
    return values


@pytest.mark.parametrize(
    "options",
    [
        {"reducer": "ddp", "equality": "close", "shard_optimizer": True},
        {"reducer": "fsdp", "equality": "exact"},
        *slow({"reducer": "ddp", "equality": "exact"}, {"reducer": "fsdp", "equality": "close"}),
    ],
    ids=str,
)
def test_nothing_that_another_process_sent_is_unpickled(tmp_path, options):
    train_with(options, configure(Evaluated, steps=2), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiling_unpickles_nothing_either(tmp_path):
    config = dataclasses.replace(configure(EvaluatedImages, steps=2), compile=CompileConfig(blocks="whole"))
    train_with({"reducer": "ddp", "equality": "close"}, config, tmp_path)


def train_with(options, config, tmp_path):
    train = dataclasses.replace(config.train, run_dir=str(tmp_path / "run"))
    distributed = DistributedConfig(device_type="cpu", **options)
    config = dataclasses.replace(config, train=train, distributed=distributed)
    first, second = run_distributed(train_and_go_on, 2, config, timeout_seconds=500)
    assert first == second
    assert (tmp_path / "run" / "model.safetensors").exists()
