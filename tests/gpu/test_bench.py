"""`lanewise bench` on a GPU: the same table, with what the device can do at most."""

import json

import pytest
import torch

from tests.integration.command import MNIST, lanewise

pytestmark = pytest.mark.gpu


def test_one_gpu_is_measured_in_both_grades(tmp_path):
    report = tmp_path / "report.json"
    options = ("--devices", "1", "--seconds", "5", "--json", report)
    lanewise("bench", MNIST, *options, cwd=tmp_path).require_success()
    written = json.loads(report.read_text())
    assert [(row["reducer"], row["failure"]) for row in written["rows"]] == [("single", None)] * 2
    assert written["machine"]["accelerators"][0] == torch.cuda.get_device_name(0)
    for row in written["rows"]:
        assert row["samples_per_second"]["median"] > 0
        assert row["fullest_bytes"] > 0
        assert sum(row["phases"].values()) == pytest.approx(1)
