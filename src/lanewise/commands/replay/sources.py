"""Finds out whether the user's modules are those of a start, and lays out those that it kept."""

import hashlib
import logging
import sys
from dataclasses import replace
from pathlib import Path

from lanewise.commands.replay.plan import ReplayPlan
from lanewise.config import RunConfig
from lanewise.config.class_path import add_search_path

logger = logging.getLogger(__name__)


def with_sources(plan: ReplayPlan, folder: Path) -> RunConfig:
    """Return the configuration of a replay, with the modules of its start in a folder where others are here.

    The present ones run, and a warning names those that differ, unless the plan trusts what the run kept.

    Args:
        plan: names the modules.
        folder: written only if the kept ones are used.
    """
    config, kept = plan.config, dict[str, bytes]()
    script = config.task.class_path.rpartition(".")[0]
    noted = plan.start.get("sources", {}).items()
    names = {script if name == "__main__" else name: digest for name, digest in noted}
    differing = [name for name, digest in names.items() if _present(name, config.search_path) != digest]
    if not differing:
        return config
    for name, digest in names.items():
        file = plan.run_dir.sources / f"{digest}.py"
        content = file.read_bytes() if plan.trust and file.is_file() else b""
        if hashlib.sha256(content).hexdigest() == digest:
            kept[name] = content
    if kept.keys() != names.keys():
        why = "the run did not keep all of its own" if plan.trust else "add --trust to run those it kept"
        logger.warning("modules differ from those of the run: %s (%s)", ", ".join(differing), why)
        return config
    for name, content in kept.items():
        is_package = any(other.startswith(f"{name}.") for other in kept)
        file = folder.joinpath(*name.split("."), *["__init__"] * is_package).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    logger.warning("modules run as the run kept them: %s", ", ".join(differing))
    add_search_path(config.search_path)  # for what was not imported there
    return replace(config, search_path=str(folder))


def _present(name: str, search_path: str | None) -> str:
    """Return the SHA-256 of a module as Python would find it here; empty where it finds none."""
    for base in filter(None, (search_path, *sys.path)):
        for ending in (".py", "/__init__.py"):
            file = Path(base, f"{name.replace('.', '/')}{ending}")
            if file.is_file():
                return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""
