"""Where datasets keep what takes long to make."""

import fcntl
import threading
from pathlib import Path

from lanewise.data.cache_folder import alone, cache_folder


def test_the_folder_is_the_users_unless_one_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(None) == tmp_path / ".cache/lanewise"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder(None) == Path("/caches/lanewise")
    assert cache_folder("~/mine") == tmp_path / "mine"
    assert cache_folder("mine") == Path.cwd() / "mine"


def test_a_second_process_waits_and_says_for_what(tmp_path, caplog):
    caplog.set_level("INFO")
    lock, done = tmp_path / "a.lock", []
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def wait():
            with alone(lock, "unpack a.zip"):
                done.append(True)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while "waiting for another process to unpack a.zip" not in caplog.text:
            assert waiting.is_alive()
        assert not done
    waiting.join()
    assert done
    assert not lock.exists()
