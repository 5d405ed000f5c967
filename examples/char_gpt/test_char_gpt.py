"""The project's tests: `pytest`."""

from pathlib import Path

from lanewise.testing import require_verified

CONFIG = Path(__file__).with_name("char_gpt.yaml")
SMALL = {"task.init_args.model": {"num_layers": 1, "num_heads": 2, "width": 16, "context": 16}}


def test_two_devices_compute_what_one_computes() -> None:
    """On a small model, which takes seconds; for the whole one there is `lanewise verify`."""
    require_verified(CONFIG, devices=[1, 2], overrides=SMALL)
