"""`lanewise verify` as a test of the user's own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lanewise.commands.verify.verify import verify
from lanewise.config.load import Override, load_config


def require_verified(
    config: str | Path,
    devices: Sequence[int] = (1, 2),
    *,
    num_steps: int = 2,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Require that numbers of devices compute the same bytes, as `lanewise verify` does.

    Each runs in processes of its own; nothing is written to the run_dir.

    Args:
        config: the configuration file.
        devices: numbers of processes to compare with one.
        num_steps: steps to take, the last one of the first epoch and the next one among them.
        overrides: of the configuration by dotted key, such as `{"task.init_args.width": 8}`, so that the test
            is fast.

    Raises:
        AssertionError: says what differs, why, and what to do about it.
        ConfigError: if the configuration cannot be run.
    """
    given = [Override(key, json.dumps(value)) for key, value in (overrides or {}).items()]
    chosen = load_config(str(config), [*given, Override("distributed.devices", "null")])
    report = verify(chosen, devices, num_steps=num_steps)
    if not report.is_verified:
        raise AssertionError("\n".join(report.lines()))
