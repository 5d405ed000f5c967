"""Unit tests mirror the source: tests/unit/lanes/test_layout.py is about src/lanewise/lanes/layout.py."""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "lanewise"
UNIT = ROOT / "tests" / "unit"


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


def test_a_test_without_its_module_is_reported() -> None:
    tests = [
        Path("lanes/test_layout.py"),
        Path("lanes/test_gone.py"),
        Path("test_errors.py"),
        Path("test_x.py"),
    ]
    modules = [Path("lanes/layout.py"), Path("errors.py"), Path("lanes/x.py")]
    assert without_source(tests, modules) == ["lanes/test_gone.py", "test_x.py"]
