"""A dataset has few files open, and each process its own."""

import copy
import os
import pickle

from lanewise.data import open_files
from lanewise.data.open_files import OpenFiles


def test_those_used_last_stay_open(monkeypatch):
    monkeypatch.setattr(open_files, "_MAX_OPEN", 2)
    opened, files = [], OpenFiles()

    def get(number):
        return files.get(number, lambda: opened.append(number) or f"file {number}")

    assert [get(number) for number in (0, 1, 0, 2, 0, 1)] == [f"file {n}" for n in (0, 1, 0, 2, 0, 1)]
    assert opened == [0, 1, 2, 1]


def test_a_copy_and_another_process_open_their_own(monkeypatch):
    files = OpenFiles()
    assert files.get(0, lambda: "ours") == "ours"
    for other in (copy.deepcopy(files), pickle.loads(pickle.dumps(files))):
        assert other.get(0, lambda: "theirs") == "theirs"
    monkeypatch.setattr(os, "getpid", lambda: -2)
    assert files.get(0, lambda: "the child's") == "the child's"
