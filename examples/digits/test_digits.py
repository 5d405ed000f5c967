"""The project's tests: `pytest`."""

from pathlib import Path

from lanewise.testing import require_verified


def test_two_devices_compute_what_one_computes() -> None:
    require_verified(Path(__file__).with_name("digits.yaml"), devices=[1, 2])
