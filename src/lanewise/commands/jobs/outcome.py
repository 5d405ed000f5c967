"""What a batch job leaves in its folder for the process that waits for it: a result, or an error."""

import json
from pathlib import Path
from typing import Any, final

from lanewise.commands.jobs.rank import read_sent_result, write_sent_result
from lanewise.errors import LanewiseError, LaunchError, PreemptedError, text_of


@final
class Outcome:
    """The outcome of one batch job.

    Args:
        job: the file that the job reads; the outcome is beside it.
    """

    def __init__(self, job: Path) -> None:
        self._result = job.with_suffix(".result")
        self._error = job.with_suffix(".error")

    def begin(self) -> None:
        """Forget what an earlier start has left."""
        self._result.unlink(missing_ok=True)
        self._error.unlink(missing_ok=True)

    def succeed(self, result: Any) -> None:
        """Leave a result, or the PreemptedError that stopped the run in good order."""
        self._result.write_bytes(write_sent_result(result))

    def fail(self, error: LanewiseError) -> None:
        """Leave an error."""
        self._error.write_text(json.dumps([text_of(error), error.exit_code]), encoding="utf-8")

    def read(self, exit_code: int, log: Path) -> Any:
        """Return the result of a job that has ended.

        Args:
            exit_code: of the job.
            log: where it logged.

        Raises:
            LaunchError: what was its error.
            PreemptedError: a signal stopped the run, which saved a checkpoint first.
        """
        if self._error.exists():
            raise LaunchError(*json.loads(self._error.read_text(encoding="utf-8")))
        if not self._result.exists():
            raise LaunchError(
                f"the batch job ended with exit code {exit_code} before it was done: see {log}."
            )
        result = read_sent_result(self._result.read_bytes())
        if isinstance(result, PreemptedError):
            raise result
        return result
