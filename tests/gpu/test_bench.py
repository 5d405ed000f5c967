"""`lanewise bench` and profiled steps on an accelerator: the same tables, with what the device did."""

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


def test_steps_are_profiled(device, tmp_path):
    length = ("--train.epochs", "null", "--train.max_steps", "3", "--train.profile_steps", "[2, 3]")
    options = ("--train.run_dir", "run", "--distributed.device_type", device.type)
    device.lanewise(tmp_path, "train", MNIST, *length, *options)
    table = (tmp_path / "run" / "profile" / "rank-00000.txt").read_text()
    assert "aten::" in table
    assert ("CUDA total" in table) is (device.type == "cuda")
