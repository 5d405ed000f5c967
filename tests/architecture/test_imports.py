"""What is imported with what: a script waits for it, and a worker that is forked does not."""

import ast
from importlib import import_module
from itertools import accumulate, product
from pathlib import Path

import lanewise
from lanewise.launch.fork_client import PRELOAD
from tests.architecture.test_layers import SRC, imports_of, read_sources


def imported_with(*names: str) -> set[str]:
    """Return the modules that importing some of ours imports; of other packages what ours name."""
    sources = read_sources(SRC)
    found, pending = set(names), list(names)
    while pending:
        for imported in imports_of(sources.get(pending.pop(), ""), sources):
            if imported.when == "run" and imported.target not in found:
                found.add(imported.target)
                pending.append(imported.target)
    return found


def test_a_loop_of_the_users_own_does_not_import_the_trainer():
    """`from lanewise import Lanes, Task` took 1.13 of the time of torch alone, and takes 1.04 to 1.07."""
    modules = imported_with("lanewise.engine.own_loop.lanes", "lanewise.task")
    assert {"lanewise.engine.step.build", "lanewise.reduce.compression", "lanewise.config.run"} <= modules
    assert not [name for name in modules if name.startswith("lanewise.engine.run")]
    assert not {"lanewise.engine.engine", "lanewise.engine.step.closure"} & modules
    assert not [name for name in modules if "ddp_comm_hooks" in name]


def test_what_lists_checkpoints_or_refuses_a_used_run_dir_needs_no_torch():
    """It took 2.6 and 3.3 s, of which torch was nearly all."""
    modules = imported_with(
        "lanewise.runs.checkpoint.folder", "lanewise.commands.jobs.train", "lanewise.cli.checkpoints"
    )
    assert {"lanewise.runs.dir", "lanewise.runs.checkpoint.manifest"} <= modules
    assert not [name for name in modules if name.partition(".")[0] == "torch"]


def test_the_public_names_are_listed_before_they_are_imported():
    assert set(lanewise.__all__) <= set(dir(lanewise))
    listed = lanewise.__dir__()
    assert len(listed) == len(set(listed))
    assert {"Any", "TYPE_CHECKING", "find_spec", "import_module"}.isdisjoint(listed)


def test_the_public_packages_are_there_after_import_lanewise(monkeypatch):
    """As pages write it, `import lanewise; lanewise.lightning.train(...)` was an AttributeError."""
    for name in ("data", "errors", "lanes", "lightning", "metrics", "nn", "testing", "trackers"):
        monkeypatch.delattr(lanewise, name, raising=False)
        assert name in dir(lanewise)
        assert getattr(lanewise, name) is import_module(f"lanewise.{name}")
    monkeypatch.setattr(lanewise, "find_spec", lambda _: None)
    assert "hugging_face" not in dir(lanewise)  # which needs a package: help(lanewise) works


def test_a_worker_is_forked_with_the_whole_engine_imported():
    modules = imported_with(*PRELOAD)
    engine = {name for name in read_sources(SRC) if name.startswith("lanewise.engine.")}
    rooms = {name.rpartition(".")[0] for name in engine}
    missing = {name for name in engine - rooms - modules if "own_loop" not in name}
    assert len(engine) > 30
    assert sorted(missing) == []


def test_tests_import_from_a_room_what_it_exports():
    """A module that moves inside its room leaves them alone."""
    sources, found = read_sources(SRC), []
    for path in Path(__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in sources:
                rooms = [*accumulate(node.module.split(".")[:-1], "{}.{}".format)][1:]
                for room, name in product(rooms, [alias.name for alias in node.names]):
                    if f" {name} as {name}\n" in sources[room] and f"{room}.{name}" not in sources:
                        found.append(f"{path}: {name} is in {room}, too")
    assert found == []
