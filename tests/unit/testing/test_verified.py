"""What a test of a user's own asks of verify."""

from types import SimpleNamespace
from typing import Any

import pytest

from lanewise.testing import require_verified, verified
from tests.integration.command import write_config


@pytest.mark.parametrize("is_verified", [True, False])
def test_one_and_two_processes_are_compared_and_what_differs_is_the_error(tmp_path, monkeypatch, is_verified):
    asked: list[Any] = []

    def verify(config, devices, *, num_steps):
        asked.append((config.train.epochs, config.distributed.devices, devices, num_steps))
        return SimpleNamespace(is_verified=is_verified, lines=lambda: ["not verified:", "the cause"])

    monkeypatch.setattr(verified, "verify", verify)
    config = write_config(tmp_path, distributed={"devices": 4, "equality": "exact"})
    if is_verified:
        require_verified(config, overrides={"train.epochs": 7})
    else:
        with pytest.raises(AssertionError, match=r"^not verified:\nthe cause"):
            require_verified(config, overrides={"train.epochs": 7})
    assert asked == [(7, None, (1, 2), 2)]
