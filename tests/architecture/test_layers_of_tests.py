"""The layers of tests by what they cost, as CONTRIBUTING.md has them: the dearest one is kept small."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
STARTERS = {"Cold", "BIN", "TORCHRUN", "LANEWISE", "run_in_forks"}
"""Names of modules of tests with which a program starts that forks no server of the tests."""
FOREIGN = "unit/commands/verify/foreign"
HIDDEN = "test_sitecustomize.py::test_the_hidden_one_is_loaded_and_torch_is_waited_for_in_ranks_only"
LIGHT = {
    "docs/test_coming_from.py::test_their_script_runs_where_its_library_is_installed",
    "docs/test_commands.py::test_a_block_fails_with_the_first_command_that_does",
    "docs/test_site.py",
    "integration/test_cli.py",
    "integration/test_init.py::test_a_new_project_trains_and_its_test_passes",
    "integration/test_launch.py",
    "integration/test_python.py::test_a_plain_script_leaves_what_the_command_line_leaves",
    "integration/test_resume.py::test_run_jsonl_tells_the_error_that_ended_a_run",
    "integration/test_strangers.py",
    "unit/cli/test_main.py",
    f"{FOREIGN}/on_path/{HIDDEN}",
    f"{FOREIGN}/test_program.py",
    "unit/config/test_load.py::test_stage_one_imports_neither_torch_nor_the_argument_parser",
    "unit/launch/test_fork_client.py",
    "unit/launch/test_scratch.py",
    "unit/processes/test_die_with_parent.py",
    "unit/processes/watch/test_process.py",
    "unit/runs/test_dir.py",
}
"""Files, and tests, of which no interpreter imports torch in `make test`: one takes less than 0.2 s."""
MOST_COLD = 6
"""Tests, with twelve interpreters of one or two seconds. Fewer is better: lower it with each that goes."""


def is_cold(function: ast.FunctionDef, imported: set[str]) -> bool:
    """Tell whether a function itself starts Python from nothing."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    commands = [
        node.args if isinstance(node, ast.Call) else node.elts
        for node in ast.walk(function)
        if isinstance(node, ast.List | ast.Tuple | ast.Call)
    ]
    starts = any(ast.unparse(part) == "sys.executable" for command in commands for part in command)
    return bool(names & STARTERS & imported) or starts


def is_slow(function: ast.FunctionDef) -> bool:
    """Tell whether `make test` leaves all cases of a test out."""
    marks = [ast.unparse(one).removeprefix("pytest.") for one in function.decorator_list]
    return any(mark == "mark.slow" or ("parametrize" in mark and ", slow(" in mark) for mark in marks)


def cold_tests() -> Iterator[str]:
    """Yield the tests of `make test` that start Python with torch from nothing, by a function of the file."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if str(path.relative_to(TESTS)) in LIGHT:
            continue
        tree = ast.parse(path.read_text())
        if (
            "pytestmark" in path.read_text()
            and "mark.slow" in path.read_text().partition("pytestmark")[2][:80]
        ):
            continue
        imported = {
            name.asname or name.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        cold = {one.name for one in functions if is_cold(one, imported)}
        for one in functions:
            name = f"{path.relative_to(TESTS)}::{one.name}"
            called = {node.id for node in ast.walk(one) if isinstance(node, ast.Name)}
            is_run = one.name.startswith("test_") and not is_slow(one) and name not in LIGHT
            if is_run and (one.name in cold or called & cold):
                yield name


def test_few_tests_start_an_interpreter_that_imports_torch():
    found = [*cold_tests()]
    assert len(found) <= MOST_COLD, "\n".join(found)


def test_what_is_light_is_there():
    missing = [one for one in LIGHT if not (TESTS / one.partition("::")[0]).exists()]
    assert missing == []
