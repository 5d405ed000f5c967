"""The benchmarks measure equal work, and write their own sections; the other libraries need not be there."""

import importlib
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (BENCHMARKS / "results.md").read_text(encoding="utf-8")
PUBLISHED = sorted(path for path in BENCHMARKS.glob("*.py") if "    publish(" in path.read_text())


@pytest.fixture
def load(monkeypatch):
    """Import a module of the benchmarks, as they import each other; forget all of them afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert not names & sys.modules.keys()
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]


def test_their_environment_is_built_by_commands_that_a_shell_can_read():
    """A comma of pip's extras once ended an argument of make's call, and with it the quoted text."""
    build = ["make", "--dry-run", "--always-make", ".venv-benchmarks/.installed"]
    commands = subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert ".[examples,parquet]" in commands
    subprocess.run(["sh", "-n"], input=commands, check=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_sides_take_turns_and_come_to_the_same_loss(load, num_processes):
    rounds, workload = load("rounds"), load("workload")
    sides = ("hand-written", "lanewise", "lanewise train", "lanewise.Lanes")
    work = workload.Tiny(num_micro_batches=2)
    trainings = {side: rounds.Training(side=side, work=work, num_processes=num_processes) for side in sides}
    seconds = rounds.take_turns(trainings, num_rounds=2, steps_per_turn=3)
    assert {side: len(times) for side, times in seconds.items()} == dict.fromkeys(sides, 2)
    assert all(0 < one < 60 for times in seconds.values() for one in times)


@pytest.mark.slow
def test_processes_that_do_not_talk_take_turns_too(load):
    rounds, workload = load("rounds"), load("workload")
    training = rounds.Training(
        side="hand-written", work=workload.Tiny(num_micro_batches=2), num_processes=2, is_alone=True
    )
    assert len(rounds.take_turns({"alone": training}, num_rounds=1, steps_per_turn=2)["alone"]) == 1


@pytest.mark.slow
def test_a_side_that_fails_says_why(load):
    rounds, workload = load("rounds"), load("workload")
    training = rounds.Training(side="nobody", work=workload.Tiny(num_micro_batches=1))
    with ExitStack() as stack, pytest.raises(SystemExit, match="KeyError: 'nobody'"):
        rounds.Processes(training, 1, 1, stack).wait()


def test_other_work_is_no_comparison(load):
    rounds, workload = load("rounds"), load("workload")
    training = rounds.Training(side="hand-written", work=workload.Tiny(num_micro_batches=1))
    both = {"one": training, "other": training}
    rounds.require_equal_work(both, {"one": (2.0, 1.0), "other": (2.0, 1.000001)})
    with pytest.raises(SystemExit, match="other computes something else"):
        rounds.require_equal_work(both, {"one": (2.0, 1.0), "other": (2.0, 1.0001)})
    with pytest.raises(SystemExit, match="one has not trained"):
        rounds.require_equal_work(both, {"one": (2.0, float("nan")), "other": (2.0, 1.0)})


@pytest.mark.slow
@pytest.mark.parametrize("side", ["hand-written", "lanewise"])
def test_the_first_batch_of_a_resumed_run_is_the_next_one(load, side, tmp_path):
    first_batch = load("first_batch")
    expected, _, _ = first_batch.run(side, 2_000, 3, tmp_path)
    samples, seconds, mebibytes = first_batch.run(side, 2_000, 3, tmp_path)
    assert samples == expected
    assert 0 < seconds < 60
    assert mebibytes >= 0


def test_a_section_replaces_the_one_of_its_title_only(load, tmp_path):
    section = load("section")
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## A\n\nold\n\n## A and more\n\nkept\n")
    section.replace_section(page, "A", "## A\n\nnew\n")
    section.replace_section(page, "B", "## B\n\nlast\n")
    assert page.read_text() == "# Page\n\n## A\n\nnew\n\n## A and more\n\nkept\n\n## B\n\nlast\n"
    section.replace_section(page, "B", "## B\n\nlast again\n")
    assert page.read_text().endswith("kept\n\n## B\n\nlast again\n")


def test_a_table_that_fails_leaves_those_before_it(load, tmp_path, monkeypatch):
    """Six minutes of a program were gone, as a later side of it had lost its port."""
    section = load("section")
    page = tmp_path / "results.md"
    page.write_text("# Page\n")
    monkeypatch.setattr(section, "PAGE", page)
    monkeypatch.setattr(section, "commit", lambda: "1a2b3c4d")
    monkeypatch.setattr(sys, "argv", ["one.py", "--write", "--rounds", "2"])

    def measure(num_rounds):
        yield f"| {num_rounds} |"
        raise SystemExit("Ignite failed")

    with pytest.raises(SystemExit, match="Ignite failed"):
        section.publish("One", "What it measures.", measure, 5)
    written = page.read_text()
    assert written.startswith("# Page\n\n## One\n\nWhat it measures.\n\n")
    assert ", commit 1a2b3c4d, " in written
    assert written.endswith("rounds.\n\n| 2 |\n")


def test_the_commit_is_said_and_whether_it_was_changed(load, tmp_path, monkeypatch):
    section = load("section")
    somebody = ["-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init"], [*somebody, "commit", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    page, program = tmp_path / "results.md", tmp_path / "program.py"
    monkeypatch.setattr(section, "PAGE", page)
    for path in (page, program):
        path.touch()
        subprocess.run(["git", "add", path], cwd=tmp_path, check=True)
        assert re.fullmatch(r"[0-9a-f]{8}" + (" with changes" if path == program else ""), section.commit())


def test_nobody_else_gets_a_port_that_is_reserved(load):
    with ExitStack() as stack:
        port = load("rounds").reserve_port(stack)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()


def test_all_that_is_published_is_of_one_commit():
    assert len(set(re.findall(r"^\d{4}-\d\d-\d\d, (commit [^,]+)", PAGE, flags=re.MULTILINE))) <= 1


def test_a_spread_is_the_median_with_the_middle_half(load):
    assert load("section").spread([1, 2, 3, 4, 100]) == "3.00 (2.00 to 4.00)"


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_the_page_says_what_a_benchmark_measures_and_make_runs_it(path):
    source = path.read_text(encoding="utf-8")
    (title,) = re.findall(r'publish\("(.*?)"', source)
    (text,) = re.findall(r'\A"""(.*?)"""', source, flags=re.DOTALL)
    assert f"## {title}\n\n{text}" in PAGE
    assert f"    python benchmarks/{path.name}\n" in text
    (made,) = re.findall(r"^BENCHMARKS := (.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert path.stem in made.split()
