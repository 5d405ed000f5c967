"""What other hosts say, on the terminal of the one that started them."""

import os
import pty

import pytest

from lanewise.launch.remote import _write


@pytest.mark.parametrize(("term", "written"), [("xterm", b"\r\033[Khost: ok\r\n"), ("dumb", b"host: ok\r\n")])
def test_a_line_takes_the_place_of_a_spinner_on_a_terminal(monkeypatch, term, written):
    monkeypatch.setenv("TERM", term)
    terminal, end = pty.openpty()
    _write(end, "host: ok")
    assert os.read(terminal, 100) == written
    os.close(end)
    os.close(terminal)


def test_a_file_gets_the_line_alone(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        _write(file.fileno(), "host: ok")
    assert (tmp_path / "out").read_bytes() == b"host: ok\n"
