"""Finds out whether the user's modules are those with which a run took the steps that are taken again."""

import re
from collections.abc import Mapping
from typing import Any

from lanewise.commands.jobs.provenance import sources
from lanewise.commands.replay.plan import ReplayPlan
from lanewise.task import Task

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def changed_sources(plan: ReplayPlan, task: Task) -> list[str]:
    """Say which modules of this process are not those of the plan's starts, and which commit has these.

    Modules that only the start imported, as those of its callbacks, have no part in a replay.
    """
    here = sources(task, plan.config.search_path)
    script = plan.config.task.class_path.rpartition(".")[0]
    here = {"__main__": here.get(script, ""), **here}
    found: dict[str, list[str]] = {}
    for start in plan.starts:
        noted = start.get("sources", {}).items()
        if names := [name for name, digest in noted if here.get(name, digest) != digest]:
            text = f"modules are not those of the run: {', '.join(names)}{_remedy(start)}"
            found.setdefault(text, []).append(f"{start['first_step']:,}")
    return [f"{text} (started at step {', '.join(steps)})" for text, steps in found.items()]


def _remedy(start: Mapping[str, Any]) -> str:
    git = start.get("git", {})
    changed = "" if git.get("is_clean") else ", with changes that it does not have"
    is_named = _COMMIT.fullmatch(str(git.get("commit")))  # which may be anybody's
    return f"; these are of commit {git['commit'][:12]}{changed}" if is_named else ""
