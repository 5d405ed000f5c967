"""Files that a dataset has open, in the process that reads them."""

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_Opened = TypeVar("_Opened")

_MAX_OPEN = 128
"""Most machines allow a process 1,024 open files; to open one takes milliseconds on some networks."""


class OpenFiles(Generic[_Opened]):
    """The open files of a dataset, by number: those that were used last.

    A copy in another process, forked or unpickled, begins with none: connections don't survive that.
    """

    def __init__(self) -> None:
        self._begin()

    def get(self, number: int, open_file: Callable[[], _Opened]) -> _Opened:
        """Return the open file of this number; call `open_file` where it isn't open."""
        if self._process != os.getpid():
            self._begin()
        if number in self._opened:
            self._opened.move_to_end(number)
        else:
            self._opened[number] = open_file()
            if len(self._opened) > _MAX_OPEN:
                self._opened.popitem(last=False)
        return self._opened[number]

    def __getstate__(self) -> dict[str, object]:
        return {"_process": -1}

    def _begin(self) -> None:
        self._opened: OrderedDict[int, _Opened] = OrderedDict()
        self._process = os.getpid()
