"""How a worker tells its launcher why it failed, in the error file of torch's elastic agent.

The agent reads the file into `ProcessFailure.error_file_data`. To the keys it knows, whose time has whole
seconds, this adds the exact time: when one rank fails, the others fail within milliseconds, at their next
collective, and the first error is the true one.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lanewise.errors import LanewiseError, LaunchError


def record_failure(error: BaseException) -> None:
    """Write the error of this worker where its agent looks for it; does nothing without an agent."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    is_ours = isinstance(error, LanewiseError)
    shown = str(error) if is_ours else "".join(traceback.format_exception(error)).rstrip()
    data = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))},
        },
        "lanewise": {"shown": shown, "seconds": time.time(), "host": socket.gethostname()},
    }
    Path(path).write_text(json.dumps(data), encoding="utf-8")


def first_failure(failures: Iterable[tuple[int, Any]]) -> LaunchError:
    """Make one error of what the workers said: the first one that failed is the cause of the others.

    Args:
        failures: rank and torch's `ProcessFailure` of each worker that failed.
    """
    rank, failure = min(failures, key=lambda item: _failed_at(item[1]))
    said = failure.error_file_data.get("lanewise")
    if said is not None:
        return LaunchError(f"{said['shown']}\n(rank {rank} on {said['host']})", failure.exitcode)
    if failure.exitcode < 0:
        return LaunchError(f"rank {rank} was killed by signal {-failure.exitcode} ({failure.signal_name()}).")
    return LaunchError(
        f"rank {rank} ended with exit code {failure.exitcode}; its log may say why.", failure.exitcode
    )


def _failed_at(failure: Any) -> float:
    """Order failures by time, those first that could not say it: killed workers, whom the others miss."""
    said = failure.error_file_data.get("lanewise")
    return float(said["seconds"]) if said is not None else 0.0
