"""How a worker tells its launcher why it failed, in the error file of torch's elastic agent.

The agent reads the file into `ProcessFailure.error_file_data`. To the keys it knows, whose time has whole
seconds, this adds the exact time: when one rank fails, the others fail within milliseconds, at their next
collective, and the first error is the true one.
"""

import json
import math
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lanewise.errors import LanewiseError, LaunchError, describe, text_of, traceback_of

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def has_agent() -> bool:
    """Tell whether an agent started this process: then it is the agent that shows the first failure."""
    return bool(os.environ.get(ERROR_FILE_VARIABLE))


def record_failure(error: BaseException) -> None:
    """Write the error of this worker where its agent looks for it; does nothing without an agent."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    is_ours = isinstance(error, LanewiseError)
    shown = describe(error) if is_ours else traceback_of(error)
    data = {
        "message": {
            "message": f"{type(error).__name__}: {text_of(error)}",
            # What torchrun shows as the traceback.
            "extraInfo": {"py_callstack": shown, "timestamp": str(int(time.time()))},
        },
        "lanewise": {
            "shown": shown,
            "is_mistake": is_ours,
            "seconds": time.time(),
            "host": socket.gethostname(),
        },
    }
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(path)  # the agent may look, or end this process, at any moment


def first_failure(failures: Iterable[tuple[int, Any]]) -> LaunchError:
    """Make one error of what the workers said: the first one that failed is the cause of the others.

    Args:
        failures: rank and torch's `ProcessFailure` of each worker that failed.
    """
    rank, failure = min(failures, key=lambda item: _failed_at(item[1]))
    said = failure.error_file_data.get("lanewise")
    if said is not None:
        shown, place = said["shown"], f"rank {rank} on {said['host']}"
        message = f"{shown}\n({place})" if said["is_mistake"] else f"{place} failed:\n{shown}"
        return LaunchError(message, failure.exitcode)
    if failure.exitcode < 0:
        why = ", often by the kernel for want of memory: see dmesg"
        return LaunchError(
            f"rank {rank} was killed by signal {-failure.exitcode} ({failure.signal_name()})"
            f"{why if failure.exitcode == -signal.SIGKILL else ''}."
        )
    return LaunchError(
        f"rank {rank} ended with exit code {failure.exitcode}; its log may say why.", failure.exitcode
    )


def _failed_at(failure: Any) -> float:
    """Order failures by time.

    Those that could not say it come first: killed workers, whom the others miss. But SIGTERM is what the
    agent sends to the others when one worker has failed.
    """
    said = failure.error_file_data.get("lanewise")
    if said is not None:
        return float(said["seconds"])
    return math.inf if failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM) else 0.0
