"""Seeds as pure functions of where in the run they are used, so that no random state is ever stored.

Each seed is the BLAKE2b digest (RFC 7693) of a purpose and a few integers: streams of different purposes,
lanes, steps and samples are unrelated, and neighbouring numbers give unrelated seeds. Whoever changes a seed
raises `_RANDOM_NUMBERS` in `engine/state/resume_check.py`, so that no exact run goes on under other seeds.
"""

from hashlib import blake2b


def model_seed(seed: int) -> int:
    """Return the seed under which every rank builds the task and its model."""
    return _digest(f"model {seed}")


def lane_seed(seed: int, step: int, lane: int, repeat: int = 0) -> int:
    """Return the seed of a lane's forward, its loss and its backward in a step: dropout and the like.

    If a step goes through its lanes several times, for one model after the other, `repeat` counts the times.
    """
    digest = _EMPTY.copy()  # not by `_digest`: each lane of each step asks
    digest.update(f"lane {seed} {step} {lane}{f' {repeat}' if repeat else ''}".encode())
    return int.from_bytes(digest.digest(), "little")


def backward_seed(seed: int, step: int, lane: int, repeat: int = 0) -> int:
    """Return the seed of a lane's backward where anything else ran since its forward: a loss of all lanes.

    `repeat` as in `lane_seed`.
    """
    return _digest(f"backward {seed} {step} {lane}", repeat)


def update_seed(seed: int, step: int, repeat: int = 0) -> int:
    """Return the seed of what follows the lanes of a step, on every rank: an optimizer that adds noise.

    `repeat` as in `lane_seed`.
    """
    digest = _EMPTY.copy()  # as in `lane_seed`
    digest.update(f"update {seed} {step}{f' {repeat}' if repeat else ''}".encode())
    return int.from_bytes(digest.digest(), "little")


def before_update_seed(seed: int, step: int) -> int:
    """Return the seed of what a task does to the gradient of a step, on every rank."""
    return _digest(f"before update {seed} {step}")


def after_update_seed(seed: int, step: int) -> int:
    """Return the seed of what a task does after the update of a step, on every rank."""
    return _digest(f"after update {seed} {step}")


def batch_loss_seed(seed: int, step: int, lane: int | None = None, repeat: int | str = 0) -> int:
    """Return the seed of a loss of all samples of a step, or of the part of it that is of a lane's samples.

    `repeat` as in `lane_seed`; "evaluation" where `step` counts the lanes' micro-batches of one.
    """
    return _digest(f"batch loss {seed} {step} {lane}", repeat)


def evaluation_seed(seed: int, step: int, lane: int) -> int:
    """Return the seed of a lane's forward on its micro-batch number `step` of an evaluation."""
    return _digest(f"evaluation {seed} {step} {lane}")


def callback_seed(seed: int, step: int) -> int:
    """Return the seed under which a callback uses the model after a step; -1 is before the first one."""
    return _digest(f"callback {seed} {step}")


def metric_seed(seed: int, name: str) -> int:
    """Return the seed under which the metrics of an eval dataset are computed from all lanes' counts."""
    return _digest(f"metric {seed} {name}")


def read_seed(seed: int, number: tuple[int, int], name: str, epoch: int, step: int, lane: int) -> int:
    """Return the seed under which a lane's samples are read and collated: augmentation, masking and the like.

    Args:
        seed: seed of the run.
        number: which of the datasets of a loop is read, and how often that was begun before.
        name: the name of a dataset that is evaluated; empty in training.
        epoch: the epoch of the turn.
        step: the step of the turn.
        lane: the lane of the turn.
    """
    digest = _EMPTY.copy()  # as in `lane_seed`
    digest.update(f"read {seed} {number[0]} {number[1]} {epoch} {step} {lane} {name}".encode())
    return int.from_bytes(digest.digest(), "little")


def stream_seed(
    seed: int, number: tuple[int, int], name: str, epoch: int, window: int, lane: int, what: str
) -> int:
    """Return the seed under which a window of a stream is read (`what` is "read"), or shuffled ("shuffle").

    Args:
        seed: seed of the run.
        number: as in `read_seed`.
        name: as in `read_seed`.
        epoch: the epoch of the window.
        window: the number of the window in the epoch.
        lane: the lane; the first one where all lanes are read together.
        what: read or shuffle.
    """
    return _digest(f"stream {what} {seed} {number[0]} {number[1]} {epoch} {window} {lane} {name}")


def sample_seed(seed: int, epoch: int, sample_index: int) -> int:
    """Return the seed under which a single sample is read outside of any turn, to look at it."""
    return _digest(f"sample {seed} {epoch} {sample_index}")


def _digest(text: str, repeat: int | str = 0) -> int:
    """Hash to 64 bits. Decimal text keeps it well defined for an integer of any size."""
    digest = _EMPTY.copy()  # a third faster than a new one
    digest.update((f"{text} {repeat}" if repeat else text).encode())
    return int.from_bytes(digest.digest(), "little")


_EMPTY = blake2b(digest_size=8)
