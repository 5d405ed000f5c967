"""How a worker tells its launcher why it failed: in the error file of torch's elastic agent.

To the keys that torchrun shows, whose time has whole seconds, this adds the exact time. When one rank fails,
the others fail within milliseconds, at their next collective, and the first error is the cause of them all.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

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
            "exit_code": error.exit_code if isinstance(error, LanewiseError) else 1,
            "seconds": time.time(),
            "host": socket.gethostname(),
        },
    }
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(path)  # the agent may look, or end this process, at any moment


def first_failure(exit_codes: Sequence[int | None], error_files: Sequence[Path]) -> LaunchError:
    """Make one error of what the workers said: the first one that failed is the cause of the others.

    Those that ended without a word come before all others: they were killed, and the others missed them.

    Args:
        exit_codes: of each rank; None where it has not ended yet.
        error_files: where each rank writes its error.
    """
    failures = []
    for rank, (code, file) in enumerate(zip(exit_codes, error_files, strict=True)):
        said = json.loads(file.read_bytes())["lanewise"] if file.exists() else None
        if said is not None or code:
            failures.append((said["seconds"] if said else 0.0, rank, code or 0, said))
    _, rank, code, said = min(failures, key=lambda failure: failure[:2])
    if said is not None:
        shown, place = said["shown"], f"rank {rank} on {said['host']}"
        message = f"{shown}\n({place})" if said["is_mistake"] else f"{place} failed:\n{shown}"
        return LaunchError(message, said["exit_code"])
    if code < 0:
        why = ", often by the kernel for want of memory: see dmesg" if code == -signal.SIGKILL else ""
        return LaunchError(f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name}){why}.")
    return LaunchError(f"rank {rank} ended with exit code {code}; its log may say why.", code)
