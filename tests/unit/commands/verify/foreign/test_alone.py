"""What several processes do when they are left alone: what is wrong is told from what may be right."""

from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.foreign.alone import look_at_alone, look_at_joining


def held(samples, *, length=12, is_ended=True, is_training=True, first_update=0, dataset="List", **more):
    return {
        "is_training": is_training,
        "is_ended": is_ended,
        "is_stream": False,
        "first_update": first_update,
        "dataset": [dataset],
        "length": length,
        "samples": samples,
        "digests": [[f"d{sample}" for sample in batch] for batch in samples],
        "is_evaluation": is_ended and not is_training,
        "reshuffles": False,
        **more,
    }


def noted(*passes, rates=(0.1, 0.1), weights=("a", "a")):
    updates = [
        {"rates": [rate], "weights": {"0.0.0": held}, "names": {}}
        for rate, held in zip(rates, weights, strict=True)
    ]
    return {"passes": list(passes), "updates": updates}


SINGLE = noted(held([[5, 2, 9, 0], [1, 11, 3, 4], [6, 7, 8, 10]]))
EVEN = [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]


def look(ranks, single=SINGLE, *, is_reduced=True):
    return [
        found.cause if isinstance(found, Finding) else found
        for found in look_at_alone(ranks, single, is_reduced=is_reduced)
    ]


def test_samples_that_are_shared_evenly_are_right():
    assert look([noted(held(samples)) for samples in EVEN]) == []


def test_the_same_shuffle_on_all_ranks_reads_samples_twice():
    assert look([noted(held(EVEN[0]))] * 2) == ["ranks read the same samples"]


def test_samples_that_one_process_draws_with_replacement_too_are_a_note():
    ranks = [noted(held([[1, 1], [5, 2]], is_ended=False)), noted(held([[1, 7], [3, 2]], is_ended=False))]
    assert look(ranks, noted(held([[1, 4, 1, 2]], is_ended=False))) == [
        "8 reads of 5 samples in these updates: 3 come again"
    ]
    assert look(ranks) == ["ranks read the same samples"]


def test_padding_of_the_last_batch_is_a_note():
    ranks = [noted(held([[0, 2], [4]], length=5)), noted(held([[1, 3], [0]], length=5))]
    single = noted(held([[0, 1, 2, 3], [4]], length=5))
    assert look(ranks, single) == ["6 reads of 5 samples in the first epoch: 1 pad the last batches"]


def test_samples_that_no_rank_reads_are_named_and_those_of_drop_last_noted():
    half = [noted(held(samples[:1])) for samples in EVEN]
    assert look(half) == ["samples are never read"]
    rest = [noted(held(samples, length=13)) for samples in EVEN]
    assert look(rest, noted(held([[0, 1, 2, 3]], length=5))) == [
        "the first epoch leaves out 1 samples, and 1 on one process, as drop_last does"
    ]
    part = [noted(held(samples, length=24)) for samples in EVEN]  # a sampler over half of the dataset
    assert look(part, noted(held([[5, 2, 9, 0, 1, 11, 3, 4, 6, 7, 8, 10]], length=24))) == [
        "the first epoch leaves out 12 samples, and 12 on one process, as drop_last does"
    ]


def test_a_second_epoch_in_the_same_order_needs_set_epoch():
    once = [noted(held(samples), held(samples[:1], is_ended=False)) for samples in EVEN]
    single = noted(held([[5, 2, 9, 0]]), held([[1, 0, 3, 2]]))
    assert look(once, single) == ["every epoch has the same order"]
    assert look(once, noted(held([[0, 1]]), held([[0, 1]]))) == []


def test_a_sampler_that_waits_for_set_epoch_is_wrong_though_one_process_has_it_too():
    """Most scripts have a DistributedSampler on one process too, where the order is then the same as well."""
    ranks = [noted(held(samples, reshuffles=True), held(samples[:1], is_ended=False)) for samples in EVEN]
    assert look(ranks, noted(held([[5, 2]], reshuffles=True), held([[5, 2]]))) == [
        "every epoch has the same order"
    ]


def test_padded_evaluation_is_told_from_one_that_every_process_does():
    training = [held(samples) for samples in EVEN]
    padded = [[[0, 1]], [[2, 0]]]
    ranks = [
        noted(train, held(samples, length=3, is_training=False))
        for train, samples in zip(training, padded, strict=True)
    ]
    assert "reads 1 of 3 samples twice, as padding" in look(ranks)[0]
    each = [noted(train, held([[0, 1, 2]], length=3, is_training=False)) for train in training]
    assert look(each) == ["each process evaluates on all samples"]


def test_weights_that_differ_are_named_unless_gradients_did_before():
    ranks = [noted(held(EVEN[0])), noted(held(EVEN[1]), weights=("a", "b"))]
    assert look(ranks) == ["ranks hold different weights"]
    assert look(ranks, is_reduced=False) == []


def test_another_learning_rate_is_a_note():
    ranks = [noted(held(samples), rates=(0.1, 0.081)) for samples in EVEN]
    assert look(ranks) == ["the learning rate differs from update 2 on: 0.081 on 2 processes, 0.1 on one"]


def test_the_updates_of_an_epoch_are_compared():
    ranks = [noted(held(samples), held([], first_update=6)) for samples in EVEN]
    single = noted(held([[5, 2, 9, 0]]), held([], first_update=3))
    assert look(ranks, single) == ["an epoch has 6 updates on 2 processes, and 3 on one"]


def test_a_data_set_that_each_rank_draws_is_a_finding_unless_one_process_has_more():
    """As of the DDP tutorial series: nothing seeds it."""

    def rank(digest, length=12):
        own = {"dataset": ["Drawn", length, digest], "digests": [[f"{digest}0", f"{digest}1"]]}
        return noted({**held([[0, 1]], is_ended=False), **own})

    own = "each rank has a data set of its own"
    assert look([rank("a"), rank("b")], rank("a")) == [own]
    assert own not in look([rank("a", 6), rank("b", 6)], rank("c", 12))  # shares of it, which is right
    assert own not in look([rank("a"), rank("a")], rank("a"))


def joining(*notes, refused=(), num_updates=2):
    ranks = [{"updates": [{}] * num_updates, "refused": refused}] * 2
    return [found.evidence for found in look_at_joining(ranks, notes)]


def test_processes_that_train_apart_are_told_where_that_is_certain():
    assert joining("joined", "group") == []
    assert joining()[0].startswith("there is no process group, no DistributedDataParallel wraps the model")
    assert joining("group")[0].startswith("there is a process group, no DistributedDataParallel wraps")
    assert joining("group", refused=["FSDP"]) == joining("group", num_updates=0) == []
    assert len(joining(refused=["an update of its weights by hand"], num_updates=0)) == 1
