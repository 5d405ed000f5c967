"""Reads samples several times and in several ways; what differs shows what they depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lanewise.commands.verify.hidden import changed, hidden_state, numbers_that_matter
from lanewise.commands.verify.probed_run import ProbedRun, chosen
from lanewise.commands.verify.time_limit import in_time
from lanewise.data import digest, opaque_types, read_turns

_NUM_SAMPLES = 32
_NUM_EVAL_SAMPLES = 8
_NUM_COLLATED = 16
_NUM_AGAIN = 16
_NUM_OTHERS = 4096


@dataclass(frozen=True)
class Reads:
    """Digests of what was read; those of a sample are of two reads in one process, from one random state."""

    num_samples: int
    samples: Mapping[str, tuple[str, str]]
    """Samples of epoch 0 by name, such as `sample 3` and `sample 0 of held_out`."""
    later: Mapping[str, str]
    """Samples of the training dataset as epoch 1 reads them, if the run has that epoch."""
    batch: Sequence[str]
    """The first lane's micro-batch, read twice, and more often if reading it changed a value."""
    changed: Sequence[str]
    """Values outside of parameters and buffers that reading and collating changed."""
    opaque: Sequence[str]
    """Types in samples and micro-batches whose values cannot be compared."""
    far: Sequence[str] = ()
    """Numbers that change the micro-batch when they are set far off."""
    left_out: Sequence[str] = ()
    """Samples of the first lane without which collate makes the same micro-batch."""
    equal_lanes: Sequence[int] = ()
    """Two lanes of a lane-aware stream that have the same samples."""
    is_by_content: bool = True
    """Whether collate leaves out the same samples when they are in another order."""
    batch_of_worker: str | None = None
    """The micro-batch as a loader's process reads it; None where the run has no such process."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Further samples: the first 4096 of the dataset."""
    cut_short: Sequence[str] = ()
    """What took so long that it was looked at less often."""

    @property
    def are_unequal(self) -> bool:
        """Whether reading again gave something else."""
        return len(set(self.batch)) > 1 or any(first != second for first, second in self.samples.values())

    def differing(self, other: "Reads") -> list[str]:
        """Return the names of the other's samples that differ from these, those of epoch 0 first."""
        found = [name for name, digests in other.samples.items() if self.samples.get(name) != digests]
        late = [name for name, value in other.later.items() if self.later.get(name) != value]
        return found + [name for name in late if name not in found]


def probe_reads(probed: ProbedRun, *, is_repeat: bool) -> Reads:
    """Read the first samples of training and evaluation.

    Args:
        probed: newly built.
        is_repeat: whether to read half of them as of epoch 1 first: they must not depend on the order.
    """
    task = probed.task
    eval_sets = probed.eval_datasets
    known = {"dataset": probed.dataset, "eval_datasets": eval_sets, "task": task}
    of_samples = set(opaque_types())  # the loader has looked at three of them
    before = hidden_state(probed.model, **known)
    of_state = set(opaque_types()) - of_samples
    training = {f"sample {index}": (probed.reader, index) for index in probed.indices[:_NUM_SAMPLES]}
    evaluation = {
        f"sample {index} of {name}": (probed.reader_of(dataset), index)
        for name, dataset in eval_sets.items()
        for index in range(min(_NUM_EVAL_SAMPLES, len(dataset)))  # type: ignore[arg-type]
    }
    sources = training | evaluation

    def read(epoch: int, name: str) -> str:
        reader, index = sources[name]
        return digest(reader.read(epoch, (index,)))

    reads = [(0, name) for name in training]
    if probed.has_later_epoch:
        half = (len(reads) + 1) // 2
        late = [(1, name) for name in training]
        reads = [*reads[:half], *late[half:], *reads[half:], *late[:half]] if is_repeat else [*reads, *late]
    reads += [(0, name) for name in evaluation]
    first = {(epoch, name): read(epoch, name) for epoch, name in reads}
    batch = [digest(probed.read())]
    opaque = [name for name in opaque_types() if name not in of_state]
    # Backwards, so that what changes with every eighth read does not fall on the same samples.
    again = probed.reader_again()
    sources |= {name: (again, index) for name, (_, index) in training.items()}
    second = {name: read(0, name) for name in reversed(sources)}
    batch.append(digest(probed.read()))
    far: Sequence[str] = ()
    names = changed(before, hidden_state(probed.model, **known))
    if names:
        batch += [digest(probed.read()) for _ in range(_NUM_AGAIN)]
        far = numbers_that_matter(lambda: digest(probed.read()) == batch[0], probed.model, **known)
    samples = {name: (first[0, name], second[name]) for name in sources}
    later = {name: value for (epoch, name), value in first.items() if epoch}
    return Reads(probed.num_samples, samples, later, batch, names, opaque, far)


def look_further(reads: Reads, probed: ProbedRun, *, has_workers: bool) -> Reads:
    """Add to the reads what one process finds out for all.

    Args:
        reads: what `probe_reads` found.
        probed: the one it was given.
        has_workers: whether the run reads in loader processes.
    """
    of_worker = None
    if has_workers:
        (batch,) = read_turns(probed.reader, [(probed.turn, probed.indices_of(probed.turn))], num_workers=1)
        of_worker = digest(batch.data)
    cut_short: list[str] = []
    first = range(min(probed.num_samples, _NUM_OTHERS))
    indices = in_time(first, cut_short, "samples that another process may have moved")
    others = {f"sample {index}": digest(probed.reader.read(0, (index,))) for index in indices}
    left_out, is_by_content = _left_out(probed)
    return replace(
        reads,
        batch_of_worker=of_worker,
        others=others,
        cut_short=cut_short,
        left_out=left_out,
        equal_lanes=[] if probed.of_stream is None else probed.of_stream.equal_lanes(),
        is_by_content=is_by_content,
    )


def _left_out(probed: ProbedRun) -> tuple[list[str], bool]:
    """Return the samples that collate leaves out of the first lane's micro-batch; whether in any order."""
    indices = probed.indices_of(probed.turn)[:_NUM_COLLATED]
    samples = probed.reader.read(0, indices)
    if len(samples) != len(indices):  # the dataset itself leaves some out
        return [], True
    try:
        found = _without_effect(probed, samples)
        backwards = _without_effect(probed, samples[::-1]) if found else []
    except Exception:  # noqa: BLE001 - a collate need not take fewer samples than training gives it
        return [], True
    is_by_content = {len(samples) - 1 - position for position in backwards} == set(found)
    return [f"sample {indices[position]}" for position in found], is_by_content


def _without_effect(probed: ProbedRun, samples: Sequence[Any]) -> list[int]:
    """Return the positions of samples without which collate makes the same micro-batch."""
    positions = range(len(samples))
    if len(samples) < 2 or len({digest(probed.collate(samples, seed)) for seed in (0, 1)}) > 1:
        return []  # what it draws would differ
    whole = digest(probed.collate(samples, 0))

    def is_same_without(position: int) -> bool:
        others = chosen(samples, [other for other in positions if other != position])
        return digest(probed.collate(others, 0)) == whole

    return [position for position in positions if is_same_without(position)]
