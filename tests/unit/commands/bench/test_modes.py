"""Which modes there are, and what of the configuration each one has."""

from dataclasses import replace

import pytest

from lanewise.commands.bench.modes import Mode, left_out, modes_here, overrides_of, shares_of
from lanewise.config import DistributedConfig
from tests.distributed.tasks import Smooth, configure

REDUCERS = ("single", "data_parallel", "ddp")


def test_one_device_has_single_and_several_have_the_others_and_a_ceiling():
    config = configure(Smooth, equality="close")
    modes = modes_here(REDUCERS, (1, 2, 2), config)
    assert [(mode.name, mode.num_devices, mode.equality) for mode in modes] == [
        ("single", 1, "exact"),
        ("single", 1, "close"),
        ("data_parallel", 2, "exact"),
        ("data_parallel", 2, "close"),
        ("ddp", 2, "exact"),
        ("ddp", 2, "close"),
        ("(never talking)", 2, "close"),
    ]
    assert [mode.is_ceiling for mode in modes] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        (Mode("ddp", 2, "close"), []),
        (Mode("ddp", 2, "exact"), ["compression", "sync_batch_norm"]),
        (Mode("single", 1, "close"), ["shard_optimizer", "compression", "sync_batch_norm"]),
    ],
)
def test_a_mode_is_without_what_it_cannot_have(mode, keys):
    section = DistributedConfig(shard_optimizer=True, compression="bf16", sync_batch_norm=True)
    assert left_out(mode, section) == keys
    assert left_out(mode, DistributedConfig()) == []
    overrides = {one.key: one.text for one in overrides_of(mode, section)}
    assert overrides["distributed.reducer"] == mode.reducer
    assert overrides["distributed.devices"] == str(mode.num_devices)
    assert overrides.keys() >= {f"distributed.{key}" for key in keys}


def test_devices_that_never_talk_share_the_lanes_as_others_do():
    config = configure(Smooth, num_lanes=5, micro_batch_size=2)
    shares = list(shares_of(config, 2))
    assert sorted(share.batch.num_lanes for share in shares) == [2, 3]
    assert {share.batch.micro_batch_size for share in shares} == {2}
    of_gpus = replace(config, distributed=DistributedConfig(device_type="cuda"))
    assert [share.distributed.devices for share in shares_of(of_gpus, 2)] == [("cuda:0",), ("cuda:1",)]
