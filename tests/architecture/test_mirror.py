"""Unit tests mirror the source: tests/unit/lanes/test_layout.py is about src/lanewise/lanes/layout.py."""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "lanewise"
UNIT = ROOT / "tests" / "unit"
WITHOUT_A_TEST = {
    ".": "task",
    "cli": "audit completion evaluate init replay report runs schema train verify",
    "commands/bench": "job warm_mode",
    "commands/diff": "diff traced",
    "commands/jobs": "outcome refused_exit train",
    "commands/plan": "memory model",
    "commands/replay": "api lane replay",
    "commands/verify": "bound evidence interaction job lane_record metric read update",
    "commands/verify/diagnoses": "forward micro_batch samples saved_state unexplained weights",
    "commands/verify/foreign": "verify_program",
    "commands/verify/foreign/on_path/lanewise_observer": "hooks observer",
    "config": "data memory optimizer orders reducers",
    "data": "file_dataset row_groups source stream",
    "engine": "observers profiler",
    "engine/buffers": "merge",
    "engine/evaluation": "prediction",
    "engine/run": "run",
    "engine/samples": "source",
    "engine/state": "restore",
    "engine/step": "build closure outputs several_losses shared update whole_loss",
    "engine/step/guard": "changed_parameters collectives foreign_gradients foreign_leaves look",
    "hugging_face": "arguments predictions task trainer weight",
    "launch": "fork_server hello host launcher local",
    "lightning": "module step task",
    "processes/watch": "heartbeat",
    "reduce": "all_reduce caller fsdp_group equal_forwards pending reducer",
    "runs": "callback",
    "runs/loggers": "build",
    "runs/report": "charts",
    "testing": "worker",
    "trackers": "mlflow",
}
"""By room, the modules without a unit test of their own: tests of other modules, of commands and of several
processes reach them. A new module has one; a module that gets one leaves this list."""


def without_source(tests: Iterable[Path], modules: Iterable[Path]) -> list[str]:
    """The test files, relative to tests/unit, that belong to no module, relative to src/lanewise."""
    known = set(modules)
    return [
        str(test) for test in sorted(tests) if test.with_name(test.name.removeprefix("test_")) not in known
    ]


def test_every_unit_test_has_its_module() -> None:
    tests = [path.relative_to(UNIT) for path in UNIT.rglob("test_*.py")]
    modules = [path.relative_to(SRC) for path in SRC.rglob("*.py")]
    assert modules
    assert without_source(tests, modules) == []


def test_every_module_has_its_unit_test() -> None:
    modules = [path.relative_to(SRC) for path in SRC.rglob("*.py") if not path.name.startswith("__")]
    listed = {f"{room}/{name}.py" for room, names in WITHOUT_A_TEST.items() for name in names.split()}
    assert without_test(modules) == {name.removeprefix("./") for name in listed}


def without_test(modules: Iterable[Path]) -> set[str]:
    return {
        str(module) for module in modules if not (UNIT / module).with_name(f"test_{module.name}").exists()
    }


def test_a_test_without_its_module_is_reported() -> None:
    tests = [
        Path("lanes/test_layout.py"),
        Path("lanes/test_gone.py"),
        Path("test_errors.py"),
        Path("test_x.py"),
    ]
    modules = [Path("lanes/layout.py"), Path("errors.py"), Path("lanes/x.py")]
    assert without_source(tests, modules) == ["lanes/test_gone.py", "test_x.py"]


def test_tests_of_several_processes_lie_in_rooms_of_the_source() -> None:
    rooms = {path.name for path in SRC.iterdir() if path.is_dir()} | {"fake_device"}
    tests = [
        path.relative_to(ROOT / "tests" / "distributed")
        for path in ROOT.glob("tests/distributed/**/test_*.py")
    ]
    assert tests
    assert [str(test) for test in tests if len(test.parts) != 2 or test.parts[0] not in rooms] == []
