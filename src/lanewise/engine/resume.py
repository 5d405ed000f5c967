"""Goes on with a run from its newest good checkpoint, on whatever devices there are now."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lanewise.checkpoint import CheckpointFolder, Manifest, load_state
from lanewise.config import MAY_DIFFER
from lanewise.engine.identity import compare
from lanewise.engine.run import Run
from lanewise.engine.scheduler import follow_new_length
from lanewise.engine.state import RunState
from lanewise.errors import CheckpointError
from lanewise.world.world import World

logger = logging.getLogger(__name__)


def resume(run: Run, folder: CheckpointFolder, allow: Collection[str]) -> int:
    """Put the parts of a run where the newest good checkpoint is.

    Collective: every rank must call this.

    Args:
        run: newly built; changed only if everything fits.
        folder: the checkpoints of the run.
        allow: which of `MAY_DIFFER` may be other than what the checkpoint is of.

    Returns:
        The step that comes next; 0 if there is no checkpoint.

    Raises:
        CheckpointError: if no checkpoint is good, or the newest good one does not fit; lists everything.
    """
    rank = run.world.rank
    found = find_newest(folder, run.world)
    if found is None:
        if rank == 0:
            logger.info("no checkpoint in %s yet: starting from the beginning", folder.path)
        return 0
    path, manifest = found
    mistakes, _ = compare(run.identity, manifest.identity, allow)
    if manifest.step > run.last_step and not mistakes:  # a mistake may be why it has fewer steps
        raise CheckpointError(
            f"{path} is of a run that took {manifest.step} steps, and this one has {run.last_step}. "
            "Raise train.max_steps or train.epochs, or use another train.run_dir."
        )
    allowed = restore(run.state, run.identity, path, manifest, allow)
    if run.training.scheduler is not None and run.identity["num_steps"] != manifest.identity.get("num_steps"):
        follow_new_length(run.training.scheduler)
    if run.evaluation is not None and run.identity.get("best") != manifest.identity.get("best"):
        run.evaluation.forget_best()
    if rank == 0:
        for difference in allowed:
            logger.warning("going on although this differs from the checkpoint: %s", difference)
        logger.info("going on from %s: %d of %d steps were taken", path, manifest.step, run.last_step)
    return manifest.step


def restore(
    state: RunState,
    identity: Mapping[str, Any],
    path: Path,
    manifest: Manifest,
    allow: Collection[str] | None = None,
) -> list[str]:
    """Put the objects of a run where a checkpoint is.

    Args:
        state: changed only if everything fits.
        identity: what identifies the run.
        path: the checkpoint.
        manifest: its manifest, verified.
        allow: which of `MAY_DIFFER` may be other than what the checkpoint is of; None: the user has no say.

    Returns:
        The differences that were allowed.

    Raises:
        CheckpointError: lists everything else that differs.
    """
    mistakes, allowed = compare(identity, manifest.identity, allow or ())
    saved = load_state(path, manifest)
    misfits = state.compare(saved)
    if mistakes or misfits:
        options = sorted({mistake.partition(" ")[0] for mistake in mistakes} & set(MAY_DIFFER))
        can_allow = options and not misfits and allow is not None
        remedy = f" To go on all the same: --allow {','.join(options)}" if can_allow else ""
        listed = "\n  ".join([*mistakes, *misfits])
        raise CheckpointError(f"{path} is of another run.\n  {listed}\nUse its configuration.{remedy}")
    state.restore(saved)
    return allowed


def find_newest(folder: CheckpointFolder, world: World) -> tuple[Path, Manifest] | None:
    """Find the newest checkpoint that verifies; rank 0 looks. Collective: every rank must call this.

    Raises:
        CheckpointError: if there are some, and none is good.
    """
    found: Any = None
    if world.rank == 0:
        try:
            found = folder.newest_good(logger.warning)
        except CheckpointError as error:
            found = error
    found = world.all_gather_object(found)[0]
    if isinstance(found, CheckpointError):
        raise found
    newest: tuple[Path, Manifest] | None = found
    return newest
