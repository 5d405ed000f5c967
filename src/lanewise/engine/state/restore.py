"""Finds the newest good checkpoint, and restores the objects of a run from it."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lanewise.config import MAY_DIFFER
from lanewise.engine.state.resume_check import WHY_LENGTH, compare
from lanewise.engine.state.run_state import RunState
from lanewise.errors import CheckpointError, describe
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import load_state

logger = logging.getLogger(__name__)


def restore(
    state: RunState,
    identity: Mapping[str, Any],
    path: Path,
    manifest: Manifest,
    allow: Collection[str] | None = None,
    adapt: Callable[[dict[str, Any]], None] | None = None,
) -> list[str]:
    """Restore the objects of a run from a checkpoint.

    Args:
        state: the state of the run; changed only if everything fits.
        identity: the identity of the run.
        path: the checkpoint.
        manifest: its manifest, verified.
        allow: those of `MAY_DIFFER` that may differ from the checkpoint; None: the caller has no such option.
        adapt: changes a saved state that fits, which is compared again.

    Returns:
        The differences that were allowed.

    Raises:
        CheckpointError: lists all other differences.
    """
    mistakes, allowed = compare(identity, manifest.identity, allow or ())
    saved = load_state(path, manifest)
    mismatches = state.compare(saved)
    if adapt is not None and not mistakes and not mismatches:
        adapt(saved)
        mismatches = state.compare(saved)
    if mistakes or mismatches:
        options = sorted({mistake.partition(" ")[0] for mistake in mistakes} & set(MAY_DIFFER))
        can_allow = options and not mismatches and allow is not None
        remedy = f" To resume anyway: --allow {','.join(options)} (allow= of train)" if can_allow else ""
        if can_allow and options == ["num_steps"] and len(mistakes) == 1:
            raise CheckpointError(
                f"{path} is of a run of {manifest.identity['num_steps']} steps, and this one has "
                f"{identity['num_steps']}{WHY_LENGTH}. Add --allow num_steps (allow= of train) "
                "to continue by the new length."
            )
        listed = "\n  ".join([*mistakes, *mismatches])
        raise CheckpointError(f"{path} is of another run.\n  {listed}\nUse its configuration.{remedy}")
    state.restore(saved)
    return allowed


def find_newest(folder: CheckpointFolder, world: World) -> tuple[Path, Manifest] | None:
    """Find the newest checkpoint that verifies; rank 0 looks. Collective: every rank must call this.

    Raises:
        CheckpointError: if there are checkpoints, but none verifies.
    """
    found: dict[str, Any] = {}
    if world.rank == 0:
        try:
            newest = folder.newest_good(logger.warning)
            if newest is not None:
                path, manifest = newest
                found = {"path": str(path), "manifest": asdict(manifest)}
        except CheckpointError as error:
            found = {"error": describe(error)}
    found = world.broadcast_tree(found)
    if "error" in found:
        raise CheckpointError(found["error"])
    return (Path(found["path"]), Manifest.from_tree(found["manifest"])) if found else None
