"""Calls of torch's store that never wait for long."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, final

from lanewise.errors import LostRankError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable with which torchrun lets rank 0 of each start keep the store."""
_SECONDS_FOR_AN_ANSWER = 3.0
_SECONDS_TO_RECOVER = 0.2


class StoreLostError(LostRankError):
    """The store does not answer.

    Args:
        message: what is wrong.
        has_ended: whether its process has ended; else that is stopped, or the way to it is cut.
    """

    def __init__(self, message: str, *, has_ended: bool) -> None:
        super().__init__(message)
        self.has_ended = has_ended


@final
class TimedStore:
    """A client of a store. Where the store does not answer, torch's own would wait for ever.

    Any thread may call every method. Each raises StoreLostError.

    Args:
        store: not used by anybody else.
        place: its host and port, and who keeps it.
    """

    def __init__(self, store: "dist.Store", place: str) -> None:
        self._store = store
        self._place = place
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._unanswered: Future[Any] | None = None
        """The last call that got no answer in time. While it has none, no other call waits for so long."""
        threading.Thread(target=self._make_calls, name="store", daemon=True).start()

    def has(self, *keys: str) -> bool:
        """Tell whether all these keys are there."""
        return self._call(lambda: self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return self._call(lambda: self._store.get(key))

    def set(self, key: str, text: str) -> None:
        """Write a value."""
        self._call(lambda: self._store.set(key, text))

    def add(self, key: str, number: int = 1) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return self._call(lambda: self._store.add(key, number))

    def close(self) -> None:
        """End the thread, and with it the store if this process keeps it. No call may follow."""
        self._calls.put(None)

    def _call(self, function: Callable[[], T]) -> T:
        from torch.distributed import DistError  # noqa: PLC0415 - a launcher loads torch when it launches

        answer: Future[T] = Future()
        self._calls.put((answer, function))
        is_cut = self._unanswered is not None and not self._unanswered.done()
        try:
            return answer.result(_SECONDS_TO_RECOVER if is_cut else _SECONDS_FOR_AN_ANSWER)
        except TimeoutError:
            self._unanswered = self._unanswered if is_cut else answer
            why, has_ended = "does not answer: that process is stopped, or the way to it is cut", False
        except DistError:
            why, has_ended = "is lost: that process has ended, or its host, or the connection was reset", True
        raise StoreLostError(f"the store at {self._place} {why}.", has_ended=has_ended)

    def _make_calls(self) -> None:
        while call := self._calls.get():
            answer, function = call
            try:
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
                answer.set_exception(error)
