"""Runs of other libraries' programs with what else a run has: fsdp, bf16, and a resume on other processes."""

from importlib.util import find_spec

import cloudpickle
import pytest

from lanewise.commands.jobs.api import config_of
from lanewise.errors import TaskError
from lanewise.testing import run_distributed
from tests.distributed.adapt.test_trainers import train_run
from tests.distributed.reduce.test_reducers import train_part

pytestmark = [
    pytest.mark.skipif(find_spec(package) is None, reason=f"not installed: {package}")
    for package in ("transformers", "accelerate", "lightning")
]
IN_ONE_PROCESS = {"reducer": "data_parallel", "devices": 2, "device_type": "cpu"}
SHARDED = {"shard_optimizer": True}
FSDP = {"reducer": "fsdp", "equality": "close"}
BLOCKS = ("GPT2Block", "TransformerEncoderLayer")


def train_a_part(world, pickled, folder, last_step):
    """Go on from what is in a folder."""
    run = cloudpickle.loads(pickled)
    return train_part(world, config_of(**run), folder, last_step, run["task"])


def on_one(world, folders):
    """Read a Trainer and a LightningModule; train them on one process, also a part of the way."""
    from tests.distributed import lightning_modules, trainers

    length = {"train": {"max_steps": 4, "run_dir": "unused"}, "batch": {"global_batch_size": 8}}
    read = [trainers.run_of("gpt2", max_steps=4, gradient_accumulation_steps=2)]
    read.append(lightning_modules.run_of("transformer", **length))
    runs = [cloudpickle.dumps(run) for run in read]
    for run, folder in zip(runs, folders, strict=True):
        train_a_part(world, run, folder, 2)
    said = []
    for run in runs:
        assert train_run(world, run, distributed=IN_ONE_PROCESS) == train_run(world, run)
        try:
            train_run(world, run, data={"order": "bucketed"})
        except TaskError as error:
            said.append(str(error))
    return runs, [(train_run(world, run), train_run(world, run, precision="bf16")) for run in runs], said


def on_two(world, runs, folders):
    """Return of each run the end of the part, and whole ones of several kinds."""
    return [
        (
            train_a_part(world, run, folder, 4),
            train_run(world, run, precision="bf16"),
            train_run(
                world, run, distributed=SHARDED, memory={"activation_checkpointing": {"blocks": [block]}}
            ),
            train_run(world, run, distributed=FSDP),
        )
        for run, folder, block in zip(runs, folders, BLOCKS, strict=True)
    ]


@pytest.mark.slow  # of each kind of run alone, test_trainers and test_lightning_modules show it
def test_they_meet_fsdp_bf16_sharding_and_a_resume_on_other_processes(tmp_path):
    folders = [str(tmp_path / name) for name in ("trainer", "module")]
    ((runs, expected, said),) = run_distributed(on_one, 1, folders)
    assert ["or another order" in text for text in said] == [
        True,
        True,
    ]  # no Trainer says how long samples are
    for rank in run_distributed(on_two, 2, runs, folders):
        for (straight, in_bf16), (resumed, on_both, sharded, by_fsdp) in zip(expected, rank, strict=True):
            assert resumed == straight[1]
            assert on_both == in_bf16 != straight
            assert sharded == straight
            assert by_fsdp[0] == pytest.approx(straight[0], rel=1e-4)
            assert by_fsdp[1].keys() == straight[1].keys()
