"""The datasets of the user's own loop: their numbers, and whether a checkpoint is of a run on them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from lanewise.engine.samples.source import CONTENT
from lanewise.errors import CheckpointError


@final
class OwnDatasets:
    """The identities of the datasets of a loop, each once, in the order in which their steps were begun.

    A checkpoint holds them. The first dataset with which a loop goes on must be among them; it may take
    another one later.
    """

    def __init__(self) -> None:
        self.identities: list[Any] = []
        self._begun: list[tuple[Mapping[str, Any], int]] = []
        """For each call of `begin`, what it got."""
        self._restored: tuple[Path, Sequence[Any]] | None = None
        """A checkpoint with its identities, until a dataset was compared with them."""

    def begin(
        self, identity: Mapping[str, Any], first_step: int, *, data_changes: bool = False
    ) -> tuple[int, int]:
        """Begin the steps of a dataset, and return its number and that of this call, for random numbers.

        Args:
            identity: of the dataset and its order.
            first_step: with which its steps begin.
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
        self.identities += [one for one in identities if one not in self.identities]

    def _compare(self, identity: Mapping[str, Any]) -> None:
        restored, self._restored = self._restored, None
        if restored is None:
            return
        path, known = restored
        if identity == _without_content(identity):  # the run may have begun without a word of changes
            known = [_without_content(one) if isinstance(one, Mapping) else one for one in known]
        if identity not in known:
            was = " or ".join(map(str, known))
            raise CheckpointError(
                f"{path} is of another run.\n  dataset was {was}, and is {identity} now\n"
                "Use its dataset, or another folder. If the loop makes or weights its samples anew, say so: "
                "lanes.steps(..., data_changes=True)."
            )


def _without_content(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key not in CONTENT}
