"""`python -m lanewise.launch.torchrun`: torchrun, which exits with the code of what failed.

torchrun itself exits with 1 after every failure, so a scheduler could not tell a user's mistake, which
another start would repeat, from a run that saved itself and is to be started again. And by default the
rendezvous c10d keeps the store of the first round, so that an agent which stays waits for workers at a store
that others do not know.
"""

import os
import signal
import sys
from collections.abc import Sequence

from lanewise.errors import PreemptedError
from lanewise.processes.watch.store import OWN_STORE_VARIABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun in this process.

    Args:
        arguments: those of torchrun; `sys.argv[1:]` if None.

    Returns:
        The exit code of what failed first, which may have been a process of another host; 1 if a signal ended
        it; after SIGTERM, which torchrun passes on, the code of a run that is to be started again.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    os.environ.setdefault(OWN_STORE_VARIABLE, "1")
    try:
        run(arguments)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        told = failure.error_file_data["message"]  # a mapping where `record_failure` wrote it
        code: int = told.get("errorCode", 1) if isinstance(told, dict) else failure.exitcode
        return max(1, code)
    except SignalException as ended:
        is_preempted = ended.sigval == signal.SIGTERM
        return PreemptedError.exit_code if is_preempted else 128 + ended.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
