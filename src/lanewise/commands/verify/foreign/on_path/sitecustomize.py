"""Loads the observer of a program when that has imported torch, and the sitecustomize that this one hides.

Python imports it at the start of every process that has this folder on its path. It must not import torch,
since a program may set variables before it does.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import final

VARIABLE = "LANEWISE_OBSERVES"
"""The environment variable with what the observer is told, as JSON."""


@final
class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls the observer after torch was imported."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "importlib.machinery.ModuleSpec | None":
        """Find torch as without this finder."""
        if name != "torch":
            return None
        # Whoever only asks whether there is a torch gets a spec, too; so this finder stays.
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_observe(module: ModuleType) -> None:
                load(module)
                importlib.import_module("lanewise_observer.hooks").observe(json.loads(os.environ[VARIABLE]))

            loader.exec_module = load_and_observe  # type: ignore[method-assign]
        return spec


def load_hidden() -> None:
    """Run the sitecustomize that Python would have found without this folder, if there is one."""
    here = Path(__file__).resolve().parent
    path = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if VARIABLE in os.environ and ("RANK" in os.environ or json.loads(os.environ[VARIABLE])["is_single"]):
        sys.meta_path.insert(0, AfterTorch())
    load_hidden()
