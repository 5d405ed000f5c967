"""Finds the weights that a run leaves: its best ones, or its last."""

from pathlib import Path

from lanewise.errors import CheckpointError
from lanewise.runs.dir import RunDir
from lanewise.runs.report.lines import JsonLinesReader, count_of
from lanewise.runs.report.status import read_status, text_of_start

_WITH_WEIGHTS = ("finished", "stopped early")
"""How a run ends that writes its last weights."""


def find_weights(folder: Path, which: str | None = None, *, averages: bool | None = None) -> tuple[Path, str]:
    """Return the file of a run's weights, and a line that says which they are.

    Args:
        folder: of the run.
        which: `best`, or `last`: those with which it ended; None: the best ones, where the run keeps them.
        averages: whether of the last ones the moving average counts, which training evaluates; None: where
            there is one.

    Raises:
        CheckpointError: if it has none of that name.
    """
    run_dir = RunDir(folder)
    has_best = run_dir.best_model.exists()
    starts = [line for line in JsonLinesReader(run_dir.record) if line.get("event") == "start"]
    keeps_best = has_best and (not starts or text_of_start(starts[-1], "evaluate", "best"))  # to the end
    which = which or ("best" if keeps_best else "last")
    if which not in ("best", "last")[not has_best :]:
        raise CheckpointError(
            f"{folder} has no weights called {which}: last are those of its end; best needs evaluate.best."
        )
    averages = run_dir.averaged_model.exists() if averages is None else averages
    last = run_dir.averaged_model if averages else run_dir.model
    file = run_dir.best_model if which == "best" else last
    step, by = written_at(run_dir)[file]
    return file, f"weights: {which}" + ("" if step is None else f", of step {step}{by}")


def written_at(run_dir: RunDir) -> dict[Path, tuple[int | None, str]]:
    """Return after which step each file of weights was written, if known, and by what it is the best."""
    name, best, _ = read_status(run_dir.path, last_bytes=None).best or ("", None, None)
    ends = [line for line in JsonLinesReader(run_dir.record) if line.get("reason") in _WITH_WEIGHTS]
    last = count_of(ends[-1].get("last_step")) if ends else None, ""
    return {run_dir.best_model: (best, f" by {name}"), run_dir.model: last, run_dir.averaged_model: last}
