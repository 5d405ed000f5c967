"""What probes show is found without starting processes, in two models of each mistake; correct twins pass."""

import importlib
import itertools
import time

import pytest
import torch

from lanewise.commands.verify.cut import probe_cut
from lanewise.commands.verify.diagnose import diagnose, notes
from lanewise.commands.verify.evidence import Evidence, LayoutResult
from lanewise.commands.verify.job import RankResult
from lanewise.commands.verify.metric import probe_metrics
from lanewise.commands.verify.probe import probe
from lanewise.commands.verify.probed_run import ProbedRun
from lanewise.config import BatchConfig
from lanewise.processes.device.determinism import set_determinism
from tests.distributed import mistakes
from tests.distributed.mistakes import CAUSES, MODELS, NAMES, one_of_each_twin
from tests.slow import slow

IN_ONE_PROCESS = [
    "mean of means",
    "sum and mean",
    "targets of the micro-batch",
    "penalty for each micro-batch",
    "metric of micro-batches",
    "generator that the model hardly uses",
    "generator that the model holds",
    "generator that the dataset hardly uses",
    "teacher that follows",
    "every hundredth forward",
    "threshold that learns",
    "teacher in a list",
    "buffer that grows in place",
    "level of a function's module",
    "every thousandth sample",
    "generator of the dataset",
    "time in the dataset",
    "items that drift",
    "items of the process",
    "cached augmentation",
    "generator of the eval dataset",
    "collate that leaves one out",
    "collate that counts",
    "generator of the model",
    "time in the forward",
    "seeds in the forward",
    "kernel",
    "running level in training",
    "decay in the forward",
    "teacher",
    "generator that the model uses rarely",
    "every seventh forward",
    "running level that starts late",
    "first micro-batch",
    "last micro-batch",
    "running level of evaluations",
    "mean as a state",
    "metric with an attribute",
]

IN_SEVERAL = [
    "items that know the rank",
    "dataset that shards itself",
    "dataset that begins elsewhere",
    "slots that know the rank",
    "forward that knows the rank",
    "forward that divides by the number of processes",
]


@pytest.fixture(autouse=True)
def _exact():
    threads = torch.get_num_threads()
    set_determinism("exact", 1)
    yield
    set_determinism("close", threads)
    torch.use_deterministic_algorithms(False)


def probed(config, monkeypatch=None):
    """Return what one process finds, the same process again, and, if ranks are to be patched, two."""
    device = torch.device("cpu")
    alone, again = (
        RankResult(
            probe(config, ProbedRun(config, device), is_reference=is_reference, is_repeat=not is_reference)
        )
        for is_reference in (True, False)
    )
    alone.cut = probe_cut(ProbedRun(config, device), alone.probe.passes.changed_buffers)
    alone.metrics = probe_metrics(ProbedRun(config, device), config.batch)
    layouts = [LayoutResult("1 process", [alone]), LayoutResult("1 again", [again])]
    if monkeypatch is not None:
        monkeypatch.setattr(mistakes, "world_size", lambda: 2)
        ranks = []
        for rank in range(2):
            monkeypatch.setattr(mistakes, "rank", lambda rank=rank: rank)
            ranks.append(RankResult(probe(config, ProbedRun(config, device), is_reference=False)))
        layouts.append(LayoutResult("2 processes", ranks))
    return Evidence(layouts)


def with_both_models(names):
    """Each name with both models; `make test` runs the first one of each cause, with the smaller model."""
    first = {CAUSES[name]: name for name in reversed(names)}.values()
    return [
        pytest.param(name, model, marks=() if name in first and model == "RowTask" else pytest.mark.slow)
        for name in names
        for model in MODELS
    ]


@pytest.mark.parametrize(("name", "model"), with_both_models(IN_ONE_PROCESS))
def test_a_mistake_is_named(name, model):
    (finding,) = diagnose(probed(mistakes.config(name, model, wrong=True)))
    assert finding.cause == CAUSES[name]
    assert NAMES.get(name, "") in finding.evidence


@pytest.mark.parametrize(("name", "model"), with_both_models(IN_SEVERAL))
def test_a_mistake_that_knows_the_rank_is_named(name, model, monkeypatch):
    (finding,) = diagnose(probed(mistakes.config(name, model, wrong=True), monkeypatch))
    assert finding.cause == CAUSES[name]
    assert "2 processes" in finding.evidence


@pytest.mark.parametrize(("name", "model"), with_both_models(one_of_each_twin(IN_ONE_PROCESS + IN_SEVERAL)))
def test_its_correct_twin_passes(name, model, monkeypatch):
    assert diagnose(probed(mistakes.config(name, model, wrong=False), monkeypatch)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("every seventh forward", ["a forward changes model.count; "]),
        ("cached augmentation", ["the dataset draws ", "reading samples changes dataset.count, "]),
        *slow(
            ("first micro-batch", ["a forward changes model.memo."]),
            ("collate that counts", ["reading samples changes task.calls; "]),
        ),
    ],
)
def test_state_that_matters_to_nothing_is_a_note(name, said, monkeypatch):
    monkeypatch.setattr(importlib.import_module("lanewise.data.digest"), "_opaque", {})  # of other tests
    evidence = probed(mistakes.config(name, "SongTask", wrong=False))
    assert diagnose(evidence) == []
    found = notes(evidence, [])
    assert [one[: len(note)] for one, note in zip(found, said, strict=True)] == said


def test_a_buffer_that_enters_the_next_loss_is_a_note():
    """BatchNorm's statistics, of which lanes make different values as well, enter no loss of training."""
    evidence = probed(mistakes.config("buffer that grows in place", "RowTask", wrong=True))
    said = "lanes make different values of kept_level, whose mean enters the next loss"
    (note,) = [note for note in notes(evidence, diagnose(evidence)) if note.startswith(said)]
    assert "the mean over the lanes mixes texts" in note


def test_what_was_looked_at_less_often_for_lack_of_time_is_a_note(monkeypatch):
    """What a machine had no time for was left out without a word."""
    monkeypatch.setattr(time, "monotonic", itertools.count(step=20.0).__next__)
    evidence = probed(mistakes.config("metric of micro-batches", "RowTask", wrong=False))
    found = [note.partition(":")[0] for note in notes(evidence, []) if "within 10 s" in note]
    assert found == [
        "samples that another process may have moved",
        "runs of the first lane's micro-batch",
        "micro-batches that are cut into samples",
        "pairs of samples of held_out, for its metrics",
    ]


def test_a_loss_that_draws_in_evaluation_says_what_to_do():
    evidence = probed(mistakes.config("seeds in the forward", "SongTask", wrong=False))
    (note,) = [note for note in notes(evidence, []) if "mean of means" in note]
    assert "Draw in training only (if self.training), or verify a copy of the task that does; a loss" in note


def test_a_collate_never_gets_more_than_a_micro_batch():
    """One that takes the only sample was called a mean of means once, since it was given sixteen."""
    batch = BatchConfig(global_batch_size=4, micro_batch_size=1)
    evidence = probed(mistakes.config("collate that takes one", "SongTask", wrong=False, batch=batch))
    assert diagnose(evidence) == []
    assert notes(evidence, [])[0] == (
        "it was not tested whether the loss is a mean of means: a micro-batch is a single sample."
    )
