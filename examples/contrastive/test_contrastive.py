"""The project's tests: `pytest`."""

from pathlib import Path

from lanewise.testing import require_verified

CONFIG = Path(__file__).with_name("contrastive.yaml")
SMALL = {"task.init_args.width": 32}


def test_two_devices_compute_what_one_computes() -> None:
    """On a small model, which takes seconds; for the whole one there is `lanewise verify`."""
    require_verified(CONFIG, devices=[1, 2], overrides=SMALL)
