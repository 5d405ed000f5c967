"""Somebody else calls every port of a run: that connection may end, the run goes on to the same model.

What torch does with such calls is its own: see docs/launch.md#security.
"""

import os
import socket
from contextlib import ExitStack, suppress

import pytest

from tests.integration.command import BIN, Cold, Command, Warm, train, write_config
from tests.listening import ports, reserve_port
from tests.patience import patient

CALLS = {
    "silence": b"",
    "one byte": b"\0",
    "a huge length": b"\xff" * 8 + b"\x7f" * 8,
    "random bytes": os.urandom(2**16),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}
EPOCHS = 40
STATIC = ("--master-addr", "127.0.0.1", "--nproc-per-node", "2", "-m", "lanewise")


def start(config, launcher: str) -> Command:
    if launcher == "lanewise":
        return Warm("train", config, "--distributed.devices", 2)
    port = reserve_port()
    return Cold(BIN / "torchrun", "--master-port", port, *STATIC, "train", config)


def call(port: int, content: bytes, calls: ExitStack) -> bool:
    """Call a port, say something, and stay; tell whether anybody answered."""
    with suppress(OSError):  # the run ends, or has hung up
        connection = calls.enter_context(socket.create_connection(("127.0.0.1", port), timeout=patient(2)))
        connection.sendall(content)
        return True
    return False


@pytest.mark.parametrize(
    ("launcher", "names", "is_often"),
    [
        ("lanewise", ["random bytes"], False),
        *(pytest.param("lanewise", [name], True, marks=pytest.mark.slow) for name in CALLS),
        pytest.param("torchrun", [*CALLS], False, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_whatever_strangers_say_at_its_ports(tmp_path, launcher, names, is_often):
    """From when a port listens, also while the processes meet there; often: all the time, at every port."""
    section = {"epochs": EPOCHS, "run_dir": str(tmp_path / "run")}
    config = write_config(tmp_path, "tasks.Evaluated", train=section)
    called: set[int] = set()
    with start(config, launcher) as running, ExitStack() as calls:
        while running.poll() is None:
            for port in ports(running.pids()):
                if is_often or port not in called:
                    called |= {port for name in names if call(port, CALLS[name], calls)}
        running.finish().require_success()
    assert len(called) == 3  # the store, and what gloo has on each rank
    train(config, "--train.run_dir", tmp_path / "alone").require_success()
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert model == (tmp_path / "alone" / "model.safetensors").read_bytes()
