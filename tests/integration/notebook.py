"""A notebook with a kernel of its own."""

import os
import uuid
from typing import Any, Self

import pytest
from jupyter_client.manager import start_new_kernel

# Of the kernel's own clients.
quiet_kernel = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


class Notebook:
    """Runs cells, and is closed with a `with` block.

    Args:
        source: the first cell.
    """

    MARKER = f"LANEWISE_TEST_NOTEBOOK={uuid.uuid4().hex}"
    # A kernel that is tested itself does not show what its child processes write.
    HIDING = ("PYTEST_CURRENT_TEST", "PYTHONWARNINGS")

    def __init__(self, source: str) -> None:
        as_a_user = {name: value for name, value in os.environ.items() if name not in self.HIDING}
        self.manager, self.client = start_new_kernel(env=as_a_user | dict([self.MARKER.split("=")]))
        self.run(source)

    def begin(self, source: str) -> None:
        """Run a cell without waiting for its end."""
        self.client.execute(source)

    def run(self, source: str) -> list[dict[str, Any]]:
        """Run a cell, and return the messages that it leads to."""
        messages: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(source, timeout=120, output_hook=messages.append)
        assert reply["content"]["status"] == "ok", messages
        return messages

    def interrupt(self) -> str:
        """Interrupt the cell that is running, and return the name of the exception that ends it."""
        self.manager.interrupt_kernel()
        while (message := self.client.get_iopub_msg(timeout=60))["msg_type"] != "error":
            pass
        return message["content"]["ename"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
