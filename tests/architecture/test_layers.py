"""The layers of docs/architecture.md, enforced on the source; the checker is tested on fake sources."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src"
ROWS = (
    {"errors"},
    {"config", "lanes"},
    {"processes.die_with_parent"},
    {"processes.device"},
    {"processes.world"},
    {"processes.watch"},
    {"runs.file", "runs.jumps", "runs.media"},
    {"runs.cut", "runs.dir", "runs.record", "runs.callback", "runs.checkpoint"},
    {"runs.loggers", "runs.report"},
    {"data"},
    {"task"},
    {"metrics", "nn", "reduce", "trackers", "adapt"},
    {"engine.precision", "engine.transforms", "engine.reachable"},
    {"engine.buffers", "engine.samples", "engine.state"},
    {"engine.step"},
    {"engine.evaluation"},
    {"engine.own_loop", "engine.run"},
    {"engine.observers", "engine.profiler"},
    {"engine.engine"},
    {"engine.micro_batch"},
    {"commands.jobs", "commands.printed", "commands.recording"},
    {"commands.verify", "commands.plan"},
    {"commands.bench", "commands.replay"},
    {"commands.diff"},
    {"cli", "testing", "hugging_face", "lightning"},
    {"__main__"},  # starts cli, and is a row of its own for that reason only
)
HAS_TWO_NAMES = "lanewise.commands.verify.foreign.on_path.lanewise_observer"
"""A package that runs under its last name, where lanewise may not be installed."""
ENGINE_OFFERS = {
    f"lanewise.engine.{module}"
    for module in (
        *("precision", "reachable", "transforms"),
        *("engine", "buffers.pack", "evaluation.eval_set", "evaluation.evaluator", "samples.dataset"),
        *(
            "run.build",
            "run.resume",
            "step.own_update",
            "step.lanes",
            "step.terms",
            "step.lane_error",
            "step.update",
        ),
    )
}
"""What verify may use of engine: it compares runs that are built and taken as the trainer does."""
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
WINGS = {room.partition(".")[0] for room in ROW_OF if "." in room}
"""Packages that hold rooms and nothing else: what they offer is imported from its room."""
LAUNCH_MAY_IMPORT = {"errors", "config", "processes.die_with_parent", "processes.watch"}
MAY_IMPORT_LAUNCH = {
    "commands.jobs",
    "commands.verify",
    "commands.bench",
    "commands.plan",
    "commands.replay",
    "testing",
    "cli",
}
FORBIDDEN = {("data", "processes.world"): "data is told which lanes to serve and never sees a rank"}
MAY_IMPORT_LATE = {"", "cli", "commands.jobs", "__main__"}
NO_TORCH_AT_IMPORT = {
    *(
        "",
        "processes",
        "runs",
        "commands",
        "errors",
        "processes.die_with_parent",
        "config",
        "lanes",
        "launch",
        "commands.jobs",
        "commands.printed",
        "runs.report",
        "cli",
        "__main__",
    )
}
NO_TORCH_EVER = {"lanewise.config.classes"}


class Import(NamedTuple):
    target: str  # a module of ours where one has that name; otherwise as written
    line: int
    when: str  # "run": with the module; "typing": under TYPE_CHECKING; "late": inside a function
    base: str  # what stands after "import", or between "from" and "import"


def room_of(module: str) -> str:
    """'lanewise.engine.step.lane' -> 'engine.step'; the package lanewise itself -> ''."""
    wing, *rest = module.split(".")[1:3] or [""]
    return ".".join([wing, *rest]) if wing in WINGS else wing


def read_sources(root: Path) -> dict[str, str]:
    parts = {path: path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path.read_text() for path, p in parts.items()}


def imports_of(source: str, modules: Mapping[str, str]) -> Iterator[Import]:
    def walk(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, when, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_package = base == "lanewise" and alias.name in {"launch", *WINGS, *ROW_OF}
                is_inner = inner in modules or is_package
                yield Import(inner if is_inner else base, node.lineno, when, base)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk_all(ast.iter_child_nodes(node), "late")
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and when == "run":
            yield from walk_all(node.body, "typing")
            yield from walk_all(node.orelse, when)
        else:
            yield from walk_all(ast.iter_child_nodes(node), when)

    def walk_all(nodes: Iterable[ast.AST], when: str) -> Iterator[Import]:
        for node in nodes:
            yield from walk(node, when)

    yield from walk(ast.parse(source), "run")


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def wrong_direction(module: str, imported: Import) -> str | None:
    """Why this import of our own code is against the table, or None."""
    own, target = room_of(module), room_of(imported.target)
    if imported.when == "late" and own not in MAY_IMPORT_LATE:
        return "is late; only what starts things imports our own code late"
    if own == "":
        return "loads with lanewise; the package only re-exports lazily" if imported.when == "run" else None
    if target == "":
        return None if own == "cli" else "is the package that re-exports; name the module itself"
    if own == target:
        return None
    if own == "commands.verify" and is_of(target, "engine") and imported.base not in ENGINE_OFFERS:
        return "is inside of engine; verify takes what ENGINE_OFFERS names"
    if own == "launch":
        allowed = target in LAUNCH_MAY_IMPORT
    elif target == "launch":
        allowed = own in MAY_IMPORT_LAUNCH
    else:
        allowed = ROW_OF.get(target, len(ROWS)) < ROW_OF.get(own, -1)
    return FORBIDDEN.get((own, target)) if allowed else f"is not below {own}"


def find_path(start: str, edges: Mapping[str, list[str]], goals: set[str]) -> list[str] | None:
    """The first path of at least one edge from start to a goal, depth first."""
    pending, seen = [[start]], set()
    while pending:
        path = pending.pop()
        for target in edges.get(path[-1], []):
            if target in goals:
                return [*path, target]
            if target not in seen:
                seen.add(target)
                pending.append([*path, target])
    return None


def violations(modules: Mapping[str, str]) -> list[str]:
    """One line for each import that breaks the table; empty where none does."""
    found: list[str] = []
    imports = {module: list(imports_of(source, modules)) for module, source in modules.items()}
    for module, own_imports in imports.items():
        if room_of(module) not in {"", "launch", *WINGS, *ROW_OF}:
            found.append(f"{module}: has no row in the table")
        for imported in own_imports:
            place = f"{module}:{imported.line}: {imported.target}"
            if imported.target.startswith(".") and not is_of(module, HAS_TWO_NAMES):
                found.append(f"{place} is relative; write the whole name")
            elif is_of(imported.target, "lanewise") and (reason := wrong_direction(module, imported)):
                found.append(f"{place} {reason}")
            elif is_of(imported.target, "torch"):
                if module in NO_TORCH_EVER:
                    found.append(f"{place}: this module imports nothing of torch")
                elif room_of(module) in NO_TORCH_AT_IMPORT - {"commands.jobs"} and imported.when == "typing":
                    found.append(f"{place}: torch is imported inside functions only")
    running = {m: [i.target for i in found_in if i.when == "run"] for m, found_in in imports.items()}
    static = {m: [i.target for i in found_in if i.when != "late"] for m, found_in in imports.items()}
    torch_names = {t for targets in running.values() for t in targets if is_of(t, "torch")}
    for module in modules:
        if room_of(module) in NO_TORCH_AT_IMPORT and (path := find_path(module, running, torch_names)):
            found.append(f"loads torch: {' -> '.join(path)}")
        if path := find_path(module, static, {module}):
            found.append(f"import cycle: {' -> '.join(path)}")
    return found


def test_the_source_keeps_to_the_table() -> None:
    modules = read_sources(SRC)
    assert "lanewise.errors" in modules
    assert violations(modules) == []


FAKE_VIOLATIONS = {
    "upward": ({"data.loader": "from lanewise.engine.step.step import step"}, "is not below data"),
    "sibling": ({"lanes.lane": "import lanewise.config.run"}, "is not below lanes"),
    "package from the root": ({"config.run": "from lanewise import engine"}, "is not below config"),
    "unknown target": ({"engine.step": "from lanewise.utils import x"}, "is not below engine"),
    "unknown package": ({"utils": "x = 1"}, "has no row in the table"),
    "through the root": ({"engine.step": "from lanewise import Task"}, "the package that re-exports"),
    "typing upward": (
        {"processes.world.world": "import typing\nif typing.TYPE_CHECKING:\n    import lanewise.cli.main"},
        "is not below processes.world",
    ),
    "data and world": (
        {"data.loader": "from lanewise.processes.world.world import World"},
        "never sees a rank",
    ),
    "launch and world": (
        {"launch.local": "from lanewise.processes.world import world"},
        "is not below launch",
    ),
    "verify and the inside of engine": (
        {"commands.verify.trace": "from lanewise.engine.step.losses import x", "engine.step.losses": ""},
        "verify takes what ENGINE_OFFERS names",
    ),
    "engine and launch": ({"engine.engine": "import lanewise.launch"}, "is not below engine"),
    "a room above": (
        {"engine.step.update": "from lanewise.engine.run.run import Run", "engine.run.run": ""},
        "is not below engine.step",
    ),
    "an unknown room": ({"engine.attic.x": "x = 1"}, "has no row in the table"),
    "into a wing itself": ({"engine": "from lanewise.engine.step.lane import x"}, "is not below engine"),
    "from a wing itself": ({"cli.train": "from lanewise.engine import x", "engine": ""}, "is not below cli"),
    "relative": ({"lanes.lane": "from .layout import x"}, "is relative"),
    "late in a method": (
        {"engine.engine": "class A:\n    def f(self):\n        from lanewise.data import d"},
        "is late",
    ),
    "eager root": ({"": "from lanewise.errors import LanewiseError", "errors": ""}, "loads with lanewise"),
    "torch in lanes": ({"lanes.lane": "from torch import nn"}, "loads torch: lanewise.lanes.lane -> torch"),
    "torch in launch": ({"launch.local": "import torch.distributed as dist"}, "loads torch"),
    "torch in a class body": ({"config.run": "class A:\n    import torch"}, "loads torch"),
    "torch behind try": (
        {"config.run": "try:\n    import torch\nexcept ImportError:\n    pass"},
        "loads torch",
    ),
    "torch for types": (
        {"config.run": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import nn"},
        "inside functions only",
    ),
    "torch by way of another": (
        {"cli.train": "from lanewise.engine import engine", "engine.engine": "import torch"},
        "loads torch: lanewise.cli.train -> lanewise.engine.engine -> torch",
    ),
    "torch late in classes": ({"config.classes": "def f():\n    import torch"}, "nothing of torch"),
    "cycle": (
        {
            "lanes.a": "from lanewise.lanes.b import x",
            "lanes.b": "import typing as t\nif t.TYPE_CHECKING:\n    from lanewise.lanes import c",
            "lanes.c": "from lanewise.lanes import a",
        },
        "import cycle: lanewise.lanes.a -> lanewise.lanes.b -> lanewise.lanes.c -> lanewise.lanes.a",
    ),
    "cycle through a package": (
        {"lanes": "from lanewise.lanes.a import A", "lanes.a": "from lanewise.lanes import A"},
        "import cycle: lanewise.lanes -> lanewise.lanes.a -> lanewise.lanes",
    ),
}
FAKE_SOUND = {
    "downward": {"engine.engine": "from lanewise.data.loader import x\nimport lanewise.errors\nimport torch"},
    "inside a package": {"lanes": "from lanewise.lanes.a import A", "lanes.a": "import numpy"},
    "lazy root": {
        "": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lanewise.task import Task"
    },
    "late cli": {
        "cli.train": "def run():\n    from lanewise.engine import engine\n    import torch",
        "engine.engine": "",
    },
    "main": {
        "__main__": "from lanewise.cli.main import main",
        "cli.main": "from lanewise import __version__",
    },
    "torch late in launch": {"launch.local": "from lanewise import config\ndef f():\n    import torch"},
    "launch from above": {"cli.train": "from lanewise.launch.local import launch"},
    "torchlike name": {"config.run": "import torchlike"},
}


def fake(sources: Mapping[str, str]) -> dict[str, str]:
    return {f"lanewise.{name}".rstrip("."): source for name, source in sources.items()}


@pytest.mark.parametrize(("sources", "expected"), FAKE_VIOLATIONS.values(), ids=FAKE_VIOLATIONS.keys())
def test_a_violation_is_reported(sources: dict[str, str], expected: str) -> None:
    assert expected in "\n".join(violations(fake(sources)))


@pytest.mark.parametrize("sources", FAKE_SOUND.values(), ids=FAKE_SOUND.keys())
def test_sound_sources_pass(sources: dict[str, str]) -> None:
    assert violations(fake(sources)) == []
