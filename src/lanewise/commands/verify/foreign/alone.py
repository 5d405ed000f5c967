"""Says what several processes do when they are left alone, beside what one does: samples, rates, updates."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.foreign.program import Noted
from lanewise.commands.verify.foreign.rows import look_at_rows


def look_at_joining(ranks: Sequence[Noted], notes: Collection[str]) -> Iterator[Finding]:
    """Find processes that do not train together, where that can be told.

    Args:
        ranks: what each of several processes noted.
        notes: the notes of all of them.
    """
    is_seen = all(noted["updates"] and not noted["refused"] for noted in ranks)
    if "joined" in notes or ("group" in notes and not is_seen):
        return
    group = "a" if "group" in notes else "no"
    yield Finding(
        "the processes do not train together",
        f"there is {group} process group, no DistributedDataParallel wraps the model, and nothing is reduced "
        "between a backward and its update: each process trains by itself",
        "Call init_process_group and wrap the model, or tell the library of the processes, as transformers "
        "by use_cpu=True without a GPU.",
    )


def look_at_alone(ranks: Sequence[Noted], single: Noted, *, is_reduced: bool) -> Iterator[Finding | str]:
    """Yield what is wrong as findings, and what may be right as notes.

    Args:
        ranks: what each of several processes noted.
        single: what one process noted that read its own samples.
        is_reduced: whether the ranks' gradients are the same; weights are different after an update if not.
    """
    yield from _look_at_weights(ranks, None if is_reduced else 1)
    training = [[held for held in noted["passes"] if held["is_training"]] for noted in (*ranks, single)]
    if all(training) and not any(held["is_stream"] for of_rank in training for held in of_rank):
        yield from _look_at_training([of_rank[0] for of_rank in training[:-1]], training[-1][0])
        yield from _look_at_order(training[:-1], training[-1])
    elif not any(training[:-1]):
        yield from look_at_rows(ranks, single)
    evaluations = [[held for held in noted["passes"] if held["is_evaluation"]] for noted in ranks]
    if all(evaluations):
        yield from _look_at_evaluation([of_rank[0] for of_rank in evaluations])
    yield from _look_at_updates(ranks, single)


def _look_at_weights(ranks: Sequence[Noted], num_updates: int | None) -> Iterator[Finding]:
    of_updates = zip(*(noted["updates"][:num_updates] for noted in ranks), strict=False)
    for number, updates in enumerate(of_updates):
        of_ranks = [update.get("weights", {}) for update in updates]
        apart = [
            place
            for place, held in of_ranks[0].items()
            if any(other.get(place) != held for other in of_ranks)
        ]
        if apart:
            names = updates[0]["names"]
            yield Finding(
                "ranks hold different weights",
                f"before update {number + 1}: {len(apart)} of {len(of_ranks[0])} parameters differ, among "
                f"them {names.get(apart[0], f'parameter {apart[0]}')}",
                "Wrap the model in DistributedDataParallel, which gives ranks the same weights and "
                "gradients, or make both the same by hand.",
            )
            return


def _samples(passes: Sequence[Any]) -> list[list[list[Any]]]:
    """Return the samples of each batch of each rank: indices, where all have the same dataset."""
    key = "samples" if all(held["dataset"] == passes[0]["dataset"] for held in passes) else "digests"
    return [held[key] for held in passes]


def _look_at_training(passes: Sequence[Any], single: Any) -> Iterator[Finding | str]:
    """Look at the first pass over the training loaders."""
    datasets = [held["dataset"] for held in passes]
    if any(held != datasets[0] for held in datasets) and all(
        held[:2] == single["dataset"][:2] for held in datasets
    ):
        yield Finding(
            "each rank has a data set of its own",
            f"a {datasets[0][0]} of {datasets[0][1]} samples on each rank, as on one process, with other "
            "contents",
            "Seed what draws it alike on all ranks before it is made, as by torch.manual_seed(0), or draw it "
            "once into a file.",
        )
    of_ranks = _samples(passes)
    reads = Counter(sample for batches in of_ranks for batch in batches for sample in batch)
    is_whole = all(held["is_ended"] for held in passes)
    rounds = max(map(len, of_ranks))
    # The last batches may be padded; loaders read ahead, so also where the pass was not seen to its end.
    rounds -= is_whole or rounds > 1
    looked = Counter(sample for batches in of_ranks for batch in batches[:rounds] for sample in batch)
    twice = [sample for sample, count in looked.items() if count > 1]
    distinct = f"{sum(reads.values())} reads of {len(reads)} samples"
    what = "the first epoch" if is_whole else "these updates"
    alone = [sample for batch in single["samples"] for sample in batch]
    if twice and len(set(alone)) == len(alone):  # else samples are drawn with replacement, or padded
        yield Finding(
            "ranks read the same samples",
            f"{distinct} in {what}; {len(twice)} were read twice or more, sample {twice[0]} among them",
            "Give the loader a DistributedSampler, or prepare it as your library says, with the same seed, "
            "shuffle and split on all ranks.",
        )
    elif len(reads) < sum(reads.values()):
        extra = sum(reads.values()) - len(reads)
        yield f"{distinct} in {what}: {extra} {'come again' if twice else 'pad the last batches'}"
    lengths = {held["length"] for held in passes}
    is_same = all(held["dataset"] == passes[0]["dataset"] for held in passes)
    if is_whole and single["is_ended"] and not twice and len(lengths) == 1 and is_same:
        missing = lengths.pop() - len(reads)
        last = sum(len(batches[-1]) for batches in of_ranks if batches)
        of_single = single["length"] - len(set(alone))
        if missing - of_single >= last:
            yield Finding(
                "samples are never read",
                f"the first epoch leaves out {missing} of {missing + len(reads)} samples",
                "Let the ranks' samplers share one dataset, all with the number of processes that there is.",
            )
        elif missing > 0:
            yield (
                f"the first epoch leaves out {missing} samples, and {of_single} on one process, as "
                "drop_last does"
            )


def _look_at_order(ranks: Sequence[Sequence[Any]], single: Sequence[Any]) -> Iterator[Finding]:
    """Look whether a second epoch begins as the first one did."""
    if any(len(of_rank) < 2 for of_rank in (*ranks, single)):
        return

    def repeats(passes: Sequence[Any]) -> bool:
        first, second = passes[0]["samples"], passes[1]["samples"]
        return bool(second) and second == first[: len(second)]

    if repeats(ranks[0]) and (ranks[0][0]["reshuffles"] or not repeats(single)):
        yield Finding(
            "every epoch has the same order",
            f"the second epoch begins with samples {ranks[0][1]['samples'][0][:4]} on rank 0, as the first",
            "Call set_epoch of the sampler before each epoch.",
        )


def _look_at_evaluation(passes: Sequence[Any]) -> Iterator[str]:
    reads = Counter(sample for batches in _samples(passes) for batch in batches for sample in batch)
    if not reads:  # there are too many to tell them apart by content
        return
    if set(reads.values()) == {len(passes)}:
        yield "each process evaluates on all samples"
    elif extra := sum(reads.values()) - len(reads):
        yield (
            f"the evaluation reads {extra} of {len(reads)} samples twice, as padding: a metric counts them, "
            "unless the program removes them, as gather_for_metrics does"
        )
    if len({held["length"] for held in passes}) == 1 and len(reads) < passes[0]["length"]:
        yield f"the evaluation leaves out {passes[0]['length'] - len(reads)} of {passes[0]['length']} samples"


def _look_at_updates(ranks: Sequence[Noted], single: Noted) -> Iterator[str]:
    for number, (several, alone) in enumerate(zip(ranks[0]["updates"], single["updates"], strict=False)):
        if several["rates"] != alone["rates"]:
            yield (
                f"the learning rate differs from update {number + 1} on: {several['rates'][0]:.6g} on "
                f"{len(ranks)} processes, {alone['rates'][0]:.6g} on one"
            )
            break
    begins = [
        [held["first_update"] for held in noted["passes"] if held["is_training"]][1:2]
        for noted in (ranks[0], single)
    ]
    if all(begins) and begins[0] != begins[1]:
        yield f"an epoch has {begins[0][0]} updates on {len(ranks)} processes, and {begins[1][0]} on one"
