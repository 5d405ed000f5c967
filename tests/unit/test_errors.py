"""The tree of errors and its exit codes, as the module draws them."""

import io
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lanewise import errors
from lanewise.errors import (
    ConfigError,
    LanewiseError,
    LaunchError,
    TaskError,
    describe,
    mistakes_of,
    noting,
    plain_lines,
    raised_at_call,
    traceback_of,
    wrapped,
)
from lanewise.processes.device.nested import map_leaves

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def test_the_exit_codes_as_drawn():
    drawn = re.findall(r"(\w+Error) +(?:exit code )?(\d+) ", errors.__doc__.replace("\n", " \n"))
    assert {name: int(code) for name, code in drawn} == {
        name: error.exit_code for name, error in CLASSES.items()
    }


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("LanewiseError", 1),
        ("ConfigError", 2),
        ("TaskError", 2),
        ("DataError", 2),
        ("RunDirError", 2),
        ("StorageError", 1),
        ("NonFiniteLossError", 1),
        ("WorldError", 1),
        ("LaunchError", 1),
    ],
)
def test_the_exit_codes(name, exit_code):
    assert CLASSES[name].exit_code == exit_code


@pytest.mark.parametrize("error", CLASSES.values())
def test_every_error_is_caught_as_the_one_base(error):
    assert issubclass(error, LanewiseError)
    assert not issubclass(error, AssertionError)


def test_a_config_error_lists_every_mistake():
    error = ConfigError("a is wrong.", "b is wrong.")
    assert error.mistakes == ("a is wrong.", "b is wrong.")
    assert str(error) == "a is wrong.\nb is wrong."
    assert isinstance(error, ValueError)


def test_of_very_many_mistakes_the_first_ten_are_shown():
    error = ConfigError(*(f"{number} is wrong." for number in range(200_004)))
    assert str(error).split("\n")[8:] == [
        "8 is wrong.",
        "9 is wrong.",
        "There are 199,994 more mistakes. Correct these first.",
    ]
    assert mistakes_of(error) == str(error).split("\n")
    assert len(error.mistakes) == 200_004


def test_a_mistake_is_one_short_line_whatever_it_quotes():
    (mistake,) = ConfigError(f"a\n\x1b[2J\u2028 {'k' * 10_000} is wrong. Remove it.").mistakes
    assert mistake.startswith(r"a\n\x1b[2J\u2028 kkk")
    assert mistake.endswith("kkk is wrong. Remove it.")
    assert len(mistake) < 700


def test_what_another_process_says_is_shown_without_what_a_terminal_obeys():
    """Colours are left out, so that no letters of them stay; what texts of some languages need is kept."""
    said = "\x1b[1;31mred\x1b[0m\tb\u3000c\u200dd\x1b[2J\x07\r\u202e\x9b\nerror: x"
    assert plain_lines(said) == "red\tb\u3000c\u200dd\\x1b[2J\\x07\\r\\u202e\\x9b\n  error: x"
    assert plain_lines(plain_lines(said)) == plain_lines(said)


@pytest.mark.parametrize(
    "error", [ConfigError("a is wrong.", "b is wrong."), LaunchError("rank 3 failed", 7)]
)
def test_an_error_survives_the_way_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_launch_error_ends_with_the_code_of_its_worker():
    assert LaunchError("rank 3 failed", 7).exit_code == 7
    assert LaunchError("rank 3 failed").exit_code == 1
    assert LaunchError.exit_code == 1


class MuteError(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_say_what_it_is_still_says_where_it_arose():
    with pytest.raises(MuteError) as caught, noting(lambda: "in sample 3"):
        raise MuteError
    assert describe(caught.value) == "<exception str() failed>\nin sample 3"


def test_an_exit_of_the_users_code_is_an_error_that_says_where():
    with pytest.raises(TaskError) as caught, noting(lambda: "in sample 3"):
        sys.exit(0)
    assert re.match(
        r"sys\.exit\(0\) was called before the end, in .*test_errors\.py, line \d+\. ", str(caught.value)
    )
    assert describe(caught.value).endswith("\nin sample 3")


CALLER = "test_a_traceback_begins_where_lanewise_calls_the_user"


def fail(_: object) -> None:
    raise ValueError("of the user")


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (fail, ["fail"]),
        (partial(map_leaves, fail), ["fail"]),
        (itemgetter(5), [CALLER, "map_leaves"]),  # no frame is the user's: it may be a bug of ours
        (len, [CALLER, "map_leaves", "__len__"]),
    ],
)
def test_a_traceback_begins_where_lanewise_calls_the_user(function, names):
    """Most of 60 lines were calls of lanewise, and the user's line was in the middle of them."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        map_leaves(function, torch.ones(()))
    written = traceback_of(caught.value)
    assert re.findall(r"^  File .* in (\w+)$", written, re.MULTILINE) == names
    assert written.startswith("Traceback (most recent call last):\n")
    assert written.splitlines()[-1].startswith(type(caught.value).__name__)


class Unreadable(Dataset[Any]):
    """No sample of it can be read."""

    def __init__(self, fails: Callable[[], object]) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        # The frames of a loader process: torch's, lanewise's and then the user's.
        return map_leaves(lambda _: self.fails(), torch.ones(()))


def read_in_a_loader(fails: Callable[[], object]) -> str:
    """Return the traceback that is shown of what happens in a loader process."""
    batches: Any = iter(DataLoader(Unreadable(fails), num_workers=1))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        map_leaves(lambda _: list(batches), torch.ones(()))
    with suppress(RuntimeError):  # which torch raises when the signal of the end comes late
        batches._shutdown_workers()
    return traceback_of(caught.value)


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_of_an_error_in_a_loader_process_its_own_traceback_is_shown(kind):
    def fails() -> None:
        raise kind("of the user")

    written = read_in_a_loader(fails)
    assert re.findall(r"^  File .* in (\w+|<lambda>)$", written, re.MULTILINE) == ["<lambda>", "fails"]
    assert written.startswith("Traceback (most recent call last):\n")
    assert written.splitlines()[-1] == traceback.format_exception_only(kind("of the user"))[0].rstrip()


def test_of_a_loader_process_that_ended_only_that_is_shown():
    written = read_in_a_loader(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert re.fullmatch(r"RuntimeError: DataLoader worker \(pid.*", written)


class Refusing(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise TaskError("say this.\nAnd this.")


def test_an_error_of_ours_in_a_loader_process_is_described_without_its_traceback():
    with pytest.raises(TaskError) as caught:
        next(iter(DataLoader(Refusing(), num_workers=1)))
    assert describe(caught.value) == "say this.\nAnd this."


def test_a_number_stays_beside_its_unit(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "24")
    shown = wrapped("parameters take 113.4 KiB, and 4 parts 0.5 s", Terminal())
    assert shown.splitlines() == ["parameters take", "113.4 KiB, and 4 parts", "0.5 s"]


def of_ours(function):
    """Make a function one of lanewise's, as the traceback sees it."""
    return FunctionType(
        function.__code__, {**globals(), "__name__": "lanewise.engine"}, closure=function.__closure__
    )


def frames_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def shown(function) -> str:
    with pytest.raises(TaskError) as caught:
        raised_at_call(function)()
    return "".join(traceback.format_exception(caught.value))


def test_an_error_that_reaches_a_script_has_no_frame_of_ours():
    """From `lanewise.train` there were up to 40 lines before the message."""

    def fail():
        raise TaskError("say it in one line")

    with pytest.raises(TaskError) as caught:
        raised_at_call(of_ours(fail))()
    assert frames_of(caught.value) == ["test_an_error_that_reaches_a_script_has_no_frame_of_ours"]
    (line,) = caught.value._render_traceback_()[-1].splitlines()  # what a notebook shows
    assert line == "lanewise.errors.TaskError: say it in one line"


def test_frames_of_the_users_code_stay():
    def in_users_code():
        raise TaskError("it arose there")

    with pytest.raises(TaskError) as caught:
        raised_at_call(of_ours(lambda: [in_users_code()]))()
    assert frames_of(caught.value) == ["test_frames_of_the_users_code_stay", "in_users_code"]
    with pytest.raises(ZeroDivisionError) as other:
        raised_at_call(of_ours(lambda: 1 / 0))()
    assert frames_of(other.value)[-1] == "<lambda>"  # what is no error of ours stays as it is


def test_a_cause_is_shown_where_it_says_more():
    def fail_again(error: str):
        def fail():
            try:
                users() if error == "user's" else ours()
            except KeyError as cause:
                raise TaskError("'said' was raised" if error == "said" else "it failed") from cause

        return of_ours(fail)

    def users():
        raise KeyError("said")

    ours = of_ours(users)
    assert "KeyError: 'said'" in shown(fail_again("user's"))
    for error in ("said", "ours"):
        assert "KeyError" not in shown(fail_again(error))
