"""The loggers of a run; a new one is a file here and a line below. Trackers, as W&B, are in `trackers/`."""

from lanewise.config import ConsoleName
from lanewise.runs.callback import Callback
from lanewise.runs.dir import RunDir
from lanewise.runs.jumps import Jumps
from lanewise.runs.loggers.json_console import JsonConsoleLogger
from lanewise.runs.loggers.jsonl import JsonlLogger
from lanewise.runs.loggers.progress import ProgressLogger
from lanewise.runs.loggers.tensorboard import TensorBoardLogger


def build_loggers(
    run_dir: RunDir, after_step: int, jumps: Jumps, console: ConsoleName, *, evaluates_first: bool
) -> list[Callback]:
    """Build what writes the numbers of a run, on rank 0.

    Args:
        run_dir: where they are written.
        after_step: the step of the checkpoint from which the run goes on; 0 where it begins.
        jumps: finds those of the loss.
        console: what the console shows.
        evaluates_first: whether the run evaluates before the next step.
    """
    return [
        JsonlLogger(run_dir.metrics, after_step, evaluates_first=evaluates_first, jumps=jumps),
        TensorBoardLogger(run_dir.tensorboard, after_step),
        JsonConsoleLogger() if console == "json" else ProgressLogger(),
    ]
