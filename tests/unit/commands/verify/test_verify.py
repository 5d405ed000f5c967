"""Which devices the processes of a layout are given, and what of the configuration they leave out."""

from dataclasses import replace

import pytest

from lanewise.commands.verify import verify
from lanewise.config import DataConfig
from tests.distributed.tasks import Language, configure


@pytest.mark.parametrize(
    ("num_devices", "devices"), [(2, 2), (3, ("xpu:0", "xpu:1", "xpu:0")), (4, ("xpu:0", "xpu:1") * 2)]
)
def test_processes_share_accelerators_where_there_are_too_few(monkeypatch, num_devices, devices):
    monkeypatch.setattr(verify, "count_accelerators", lambda _device_type: 2)
    monkeypatch.setattr(verify, "accelerator_type", lambda: "xpu")
    assert verify._in_exact(configure(Language), num_devices).distributed.devices == devices
    monkeypatch.setattr(verify, "count_accelerators", lambda _device_type: 0)
    assert verify._in_exact(configure(Language), num_devices).distributed.devices == num_devices


def test_what_depends_on_the_layout_is_left_out_and_named():
    config = configure(Language, equality="close")
    distributed = replace(config.distributed, compression="fp16", sync_batch_norm=True, shard_optimizer=True)
    config = replace(config, distributed=distributed, data=DataConfig(drop_last=True))
    for num_devices in (1, 3):
        exact = verify._in_exact(config, num_devices).distributed
        assert (exact.compression, exact.sync_batch_norm) == (None, False)
        assert exact.shard_optimizer == (num_devices > 1)
    named = ["distributed.compression fp16", "distributed.sync_batch_norm true"]
    assert verify._left_out(distributed) == named
    assert verify._left_out(exact) == []
