"""The datasets of the user's own loop: their numbers, and whether a checkpoint is of a run on them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from lanewise.data import StreamLoader
from lanewise.engine.samples.source import CONTENT
from lanewise.errors import CheckpointError


@final
class OwnDatasets:
    """The datasets of a loop, in the order in which their steps were begun.

    A checkpoint holds their identities, each once. The first dataset with which a loop goes on must be among
    them; it may take another one later. It also holds where the streams among them are. Usually a checkpoint
    is restored before the loop begins with its streams: what it has of a stream is kept until then.
    """

    def __init__(self) -> None:
        self.identities: list[Any] = []
        self._begun: list[tuple[Mapping[str, Any], int]] = []
        """What each call of `begin` got."""
        self._restored: tuple[Path, Sequence[Any]] | None = None
        """A checkpoint with its identities, until a dataset was compared with them."""
        self._streams: list[StreamLoader] = []
        self._restored_streams: Mapping[str, Any] = {}
        """The states of a checkpoint's streams, by number."""

    def begin(
        self, identity: Mapping[str, Any], first_step: int, *, data_changes: bool = False
    ) -> tuple[int, int]:
        """Begin the steps of a dataset, and return its number and that of this call, for random numbers.

        Args:
            identity: what tells the dataset and its order from others.
            first_step: the step with which it begins.
            data_changes: whether other samples or weights than in an earlier call are the same dataset.

        Raises:
            CheckpointError: if the checkpoint is of a run on other datasets.
        """
        identity = _without_content(identity) if data_changes else identity
        self._compare(identity)
        if identity not in self.identities:
            self.identities.append(identity)
        call = (identity, first_step)
        numbers = self.identities.index(identity), self._begun.count(call)
        self._begun.append(call)
        return numbers

    def restore(self, identities: Sequence[Any], path: Path) -> None:
        """Add the identities of a checkpoint.

        Raises:
            CheckpointError: if it is of a run on other datasets than the one that was begun already.
        """
        self._restored = (path, identities) if identities else None
        for identity, _ in self._begun[:1]:
            self._compare(identity)
        self.identities += [identity for identity in identities if identity not in self.identities]

    def add_stream(self, stream: StreamLoader) -> None:
        """Add a stream, which goes on where a restored checkpoint was."""
        state = self._restored_streams.get(str(len(self._streams)))
        if state is not None:
            stream.load_state_dict(state)
        self._streams.append(stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all streams. Collective: every rank must call this."""
        states = {str(number): stream.state_dict() for number, stream in enumerate(self._streams)}
        return {**self._restored_streams, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the streams go on where `state_dict` was called.

        Raises:
            ValueError: if a stream was cut into other lanes.
        """
        self._restored_streams = dict(state)
        for number, stream in enumerate(self._streams):
            if str(number) in state:
                stream.load_state_dict(state[str(number)])

    def _compare(self, identity: Mapping[str, Any]) -> None:
        restored, self._restored = self._restored, None
        if restored is None:
            return
        path, known = restored
        if identity == _without_content(identity):  # the run may have begun without a word of changes
            known = [_without_content(other) if isinstance(other, Mapping) else other for other in known]
        if identity not in known:
            was = " or ".join(map(str, known))
            raise CheckpointError(
                f"{path} is of another run.\n  dataset was {was}, and is {identity} now\n"
                "Use its dataset, or another folder. If the loop makes or weights its samples anew, say so: "
                "lanes.steps(..., data_changes=True)."
            )


def _without_content(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key not in CONTENT}
