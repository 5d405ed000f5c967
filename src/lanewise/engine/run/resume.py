"""Resumes a run from its newest good checkpoint, on any number of devices."""

import logging
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

from lanewise.engine.run.optimizer import parameter_groups
from lanewise.engine.run.run import Run
from lanewise.engine.run.scheduler import retake
from lanewise.engine.state.restore import find_newest, restore
from lanewise.engine.state.resume_check import compare
from lanewise.errors import CheckpointError
from lanewise.runs.checkpoint.folder import CheckpointFolder

logger = logging.getLogger(__name__)

_MOST_SHOWN = 5


def resume_run(run: Run, folder: CheckpointFolder, allow: Collection[str]) -> int:
    """Restore the parts of a run from its newest good checkpoint.

    Collective: every rank must call this.

    Args:
        run: newly built; changed only if everything fits.
        folder: the checkpoints of the run.
        allow: those of `MAY_DIFFER` that may differ from the checkpoint.

    Returns:
        The next step; 0 if there is no checkpoint.

    Raises:
        CheckpointError: if no checkpoint is good, or the newest good one does not fit; lists all mismatches.
    """
    rank = run.world.rank
    found = find_newest(folder, run.world)
    if found is None:
        if rank == 0:
            told = "" if run.world.is_restarted else _others_near(folder.path.parent)
            logger.warning("no checkpoint in %s yet: starting from the beginning%s", folder.path, told)
        return 0
    path, manifest = found
    if manifest.identity.get("num_steps") is not None:
        run.note_length()
    mistakes, _ = compare(run.identity, manifest.identity, allow)
    is_beyond = run.last_step is not None and manifest.step > run.last_step
    if is_beyond and not mistakes:  # a mistake may explain the smaller number of steps
        raise CheckpointError(
            f"{path} is of a run that took {manifest.step} steps, and this one has {run.last_step}. "
            "Raise train.max_steps or train.epochs, or use another train.run_dir."
        )
    training, adapt = run.training, None
    is_length_new = run.identity["num_steps"] != manifest.identity.get("num_steps")
    if "optimizer" in allow or (training.scheduler is not None and is_length_new):
        both = manifest.identity, run.identity
        before, now = (of.get("optimizer", {}).get("init_args", {}).get("lr") for of in both)
        kept = ("lr",) * (run.plateau is not None and before == now)  # else it would rise to where it began
        groups = parameter_groups(run.config.optimizer, run.runner.task, training.model)
        adapt = retake(training, groups, manifest.step // training.steps_per_value, kept)
    allowed = restore(run.state, run.identity, path, manifest, allow, adapt)
    run.identity["init_from"] = manifest.identity.get("init_from")  # with these weights the run began
    if run.evaluation is not None and run.identity.get("best") != manifest.identity.get("best"):
        run.evaluation.forget_best()
    if rank == 0:
        for difference in allowed:
            logger.warning("resuming although this differs from the checkpoint: %s", difference)
        taken = f"{manifest.step:,}" if run.last_step is None else f"{manifest.step:,} of {run.last_step:,}"
        logger.info("resuming from %s: %s steps were taken", path, taken)
    return manifest.step


def _others_near(run_dir: Path) -> str:
    """Name runs that have checkpoints, the nearest names first, as it or its parent may be misspelt."""
    parent = run_dir.parent
    alike = get_close_matches(parent.name, [folder.name for folder in parent.parent.glob("*")])
    folders = {parent, *(parent.parent / name for name in alike)}
    saved = {str(run.parents[1]) for folder in folders for run in folder.glob("*/checkpoints/step-*")}
    near = get_close_matches(str(run_dir), sorted(saved), n=_MOST_SHOWN, cutoff=0.0)
    return f". Near it there are checkpoints in {', '.join(near)}" if near else ""
