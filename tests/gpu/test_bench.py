"""`lanewise bench` on an accelerator: the same table, with what the device can do at most."""

import json

import pytest

from tests.integration.command import MNIST


def test_a_device_is_measured_in_both_grades(device, tmp_path):
    report = tmp_path / "report.json"
    options = ("--devices", "1", "--seconds", "2", "--json", report, "--distributed.device_type", device.type)
    device.lanewise(tmp_path, "bench", MNIST, *options)
    written = json.loads(report.read_text())
    assert [(row["reducer"], row["failure"]) for row in written["rows"]] == [("single", None)] * 2
    assert written["machine"]["accelerators"][0] == device.name
    for row in written["rows"]:
        assert row["samples_per_second"]["median"] > 0
        assert row["fullest_bytes"] > 0
        assert sum(row["phases"].values()) == pytest.approx(1)
