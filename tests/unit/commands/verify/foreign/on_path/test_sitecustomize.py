"""Python loads ours and the one that it hides, and only ranks are observed."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lanewise.commands.verify.foreign.on_path import sitecustomize

SHOW = (
    "import builtins, sys; "
    "print(getattr(builtins, 'hidden', ''), 'AfterTorch' in [type(f).__name__ for f in sys.meta_path], "
    "'torch' in sys.modules)"
)


@pytest.mark.parametrize(
    ("variables", "is_observed"),
    [
        ({}, False),
        ({"RANK": "0"}, False),
        ({sitecustomize.VARIABLE: json.dumps({"is_single": False})}, False),  # torchrun itself
        ({sitecustomize.VARIABLE: json.dumps({"is_single": False}), "RANK": "1"}, True),
        ({sitecustomize.VARIABLE: json.dumps({"is_single": True})}, True),
    ],
)
def test_the_hidden_one_is_loaded_and_torch_is_waited_for_in_ranks_only(tmp_path, variables, is_observed):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.hidden = 'loaded'")
    path = os.pathsep.join([str(Path(sitecustomize.__file__).parent), str(tmp_path)])
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**environment, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["loaded", str(is_observed), "False"]


def test_who_only_asks_whether_there_is_a_torch_does_not_end_the_waiting(tmp_path):
    """transformers, accelerate and datasets do, and an import of torch after theirs was not observed."""
    told = {"folder": str(tmp_path), "num_updates": 1, "until": "updates", "replay": None, "is_single": True}
    program = (
        "import importlib.util, sys; importlib.util.find_spec('torch'); import torch; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(sitecustomize.__file__).parent),
            sitecustomize.VARIABLE: json.dumps(told),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert "lanewise_observer.hooks" in done.stdout.split()


def test_what_is_in_the_process_of_a_program_needs_python_and_torch_alone():
    folder = Path(sitecustomize.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    needed = {name.partition(".")[0] for name in names}
    assert len(needed) > 5
    assert needed - sys.stdlib_module_names == {"torch"}
