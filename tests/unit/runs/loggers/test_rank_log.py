"""Rank 0 has the console; the other ranks have a file for all that they say."""

import os
import re
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lanewise.testing import run_distributed

SCRIPT = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from lanewise.runs.loggers.rank_log import RankLog

print("print before")
RankLog(Path(sys.argv[1]), int(sys.argv[2]))
print("print to stdout")
print("print to stderr", file=sys.stderr)
sys.stdout.flush()
os.write(1, b"native to 1\\n")
os.write(2, b"native to 2\\n")
subprocess.run(["echo", "a program"], check=True)
logging.getLogger("mine").info("an info")
logging.getLogger("mine").debug("a debug")
warnings.warn("a warning", UserWarning)
raise KeyError("an error")
"""


def in_a_process(world, script: str, arguments: list[str], folder: str) -> int:
    """Do what `python -W default -c SCRIPT` does whose standard streams are files; return the exit code."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    warnings.resetwarnings()
    warnings.simplefilter("default")
    sys.argv = ["-c", *arguments]
    code = 0
    try:
        exec(script, {"__name__": "__main__"})
    except KeyError:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    return code


def start(script: str, *arguments: object) -> tuple[int, str, str]:
    """Run a script; return its exit code, standard output and standard error."""
    with TemporaryDirectory() as folder:
        (code,) = run_distributed(in_a_process, 1, script, list(map(str, arguments)), folder)
        return code, *((Path(folder) / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))


def run(path, rank: int) -> tuple[str, str, str]:
    """What a rank wrote to its standard output, its standard error and its log."""
    code, stdout, stderr = start(SCRIPT, path, rank)
    assert code == 1
    return stdout, stderr, path.read_text(encoding="utf-8")


def test_other_ranks_are_silent(tmp_path):
    stdout, stderr, _ = run(tmp_path / "logs" / "rank-00001.log", 1)
    assert stdout == "print before\n"
    assert stderr == ""


@pytest.mark.parametrize(
    "said",
    [
        "print to stdout\n",
        "print to stderr\n",
        "native to 1\n",
        "native to 2\n",
        "a program\n",
        " INFO mine: an info\n",
        "UserWarning: a warning\n",
        "Traceback (most recent call last):\n",
        "KeyError: 'an error'\n",
    ],
)
def test_all_that_another_rank_says_is_in_its_log_once(other_log, said):
    assert other_log.count(said) == 1


@pytest.fixture(scope="module")
def other_log(tmp_path_factory) -> str:
    return run(tmp_path_factory.mktemp("run") / "rank-00001.log", 1)[2]


def test_a_log_is_in_order_and_says_when(other_log):
    places = [
        other_log.index(said) for said in ("print to stdout", "native to 1", "an info", "a warning", "KeyErr")
    ]
    assert places == sorted(places)
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO mine: an info$", other_log, re.MULTILINE)
    assert re.search(r" WARNING py\.warnings: .*UserWarning: a warning", other_log)
    assert "a debug" not in other_log


def test_rank_zero_keeps_the_console(tmp_path):
    stdout, stderr, log = run(tmp_path / "logs" / "rank-00000.log", 0)
    assert stdout == "print before\nprint to stdout\nnative to 1\na program\n"
    assert stderr.startswith("print to stderr\nnative to 2\nan info\n")
    assert stderr.count("UserWarning: a warning") == 1
    assert "KeyError: 'an error'" in stderr
    assert log.splitlines()[0].endswith(" INFO mine: an info")
    assert log.count("UserWarning: a warning") == 1
    assert "print" not in log
    assert "native" not in log


def test_what_is_there_is_kept(tmp_path):
    path = tmp_path / "rank-00001.log"
    path.write_text("the first try\n")
    _, _, log = run(path, 1)
    assert log.startswith("the first try\n")
    assert "print to stdout\n" in log


TWICE = """
import logging, sys
from pathlib import Path
from lanewise.runs.loggers.rank_log import RankLog

logging.basicConfig()
for name in sys.argv[1:]:
    RankLog(Path(name), 0)
    logging.getLogger("mine").info("to %s", name)
"""


def test_it_replaces_the_handlers_that_were_there(tmp_path):
    names = [str(tmp_path / "a.log"), str(tmp_path / "b.log")]
    assert start(TWICE, *names)[2] == f"to {names[0]}\nto {names[1]}\n"
    assert [(tmp_path / name).read_text().count("to ") for name in ("a.log", "b.log")] == [1, 1]


KILLED = """
import os, signal, sys
from pathlib import Path
from lanewise.runs.loggers.rank_log import RankLog

RankLog(Path(sys.argv[1]), 1)
print("last words")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_rank_printed_is_in_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="ended without a result"):
        start(KILLED, tmp_path / "rank-00001.log")
    assert (tmp_path / "rank-00001.log").read_text() == "last words\n"


SHARED = """
import logging, os, sys, warnings
from pathlib import Path
from lanewise.runs.loggers.rank_log import RankLog

folder, rank = Path(sys.argv[1]), int(sys.argv[2])

def is_first(key):
    try:
        (folder / key.encode().hex()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

RankLog(folder / f"rank-{rank}.log", rank).share_warnings(is_first)
logging.info("an info")
logging.warning("all ranks say this")
logging.warning("all ranks say this")
logging.warning("only rank %d says this", rank)
if os.fork() == 0:
    logging.warning("a loader process says this")
    os._exit(0)
os.wait()
"""


def test_warnings_of_every_rank_are_on_the_console_once(tmp_path):
    said = [start(SHARED, tmp_path, rank)[2].splitlines() for rank in (1, 0, 2)]
    assert said[0] == ["[rank 1] all ranks say this"] * 2 + ["[rank 1] only rank 1 says this"]
    assert said[1] == ["an info", "only rank 0 says this", "a loader process says this"]
    assert said[2] == ["[rank 2] only rank 2 says this"]
    for rank in range(3):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert log.count("all ranks say this") == 2
        assert "a loader process says this" in log


ODD = """
import logging, sys
from pathlib import Path
from lanewise.runs.loggers.rank_log import RankLog

RankLog(Path(sys.argv[1]), int(sys.argv[2])).share_warnings(lambda _: True)
logging.getLogger("mine").warning("the file %s", "a\\udcffb")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_is_no_text_is_written_as_its_bytes(tmp_path, rank):
    code, _, stderr = start(ODD, tmp_path / "log", rank)
    assert code == 0
    for text in (stderr, (tmp_path / "log").read_text()):
        assert "the file a\\udcffb\n" in text
