"""Which devices the processes of a layout are given."""

import pytest

from lanewise.verify import verify
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
