"""The streams of the user's own loop, as far as a checkpoint holds them."""

from collections.abc import Mapping
from typing import Any, final

from lanewise.data.source import SourceState


@final
class OwnStreams:
    """The streams of a loop, in the order in which their steps were begun.

    A checkpoint is usually restored before the loop begins with its streams: what it has of a stream is kept
    until then.
    """

    def __init__(self) -> None:
        self._states: list[SourceState] = []
        self._restored: Mapping[str, Any] = {}

    def add(self, of_stream: SourceState) -> None:
        """Add a stream, which goes on where a restored checkpoint was."""
        state = self._restored.get(str(len(self._states)))
        if state is not None:
            of_stream.load_state_dict(state)
        self._states.append(of_stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all streams. Collective: every rank must call this."""
        states = {str(number): one.state_dict() for number, one in enumerate(self._states)}
        return {**self._restored, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the streams go on where `state_dict` was called.

        Raises:
            ValueError: if a stream was cut into other lanes.
        """
        self._restored = dict(state)
        for number, one in enumerate(self._states):
            if str(number) in state:
                one.load_state_dict(state[str(number)])
