"""Evidence in, findings out: what each diagnosis is found by, and which of several is named."""

from dataclasses import replace
from pkgutil import iter_modules

import pytest

from lanewise.commands.verify import diagnoses
from lanewise.commands.verify.bound import CloseResult
from lanewise.commands.verify.cut import CutProbe
from lanewise.commands.verify.diagnose import DIAGNOSES, diagnose
from lanewise.commands.verify.evidence import Evidence, LayoutResult
from lanewise.commands.verify.hidden import GeneratorProbe
from lanewise.commands.verify.job import RankResult
from lanewise.commands.verify.metric import MetricProbe
from lanewise.commands.verify.operators import Call
from lanewise.commands.verify.probe import History, Passes, Probe
from lanewise.commands.verify.read import Reads
from lanewise.commands.verify.trace import CHECKS, Trace
from lanewise.commands.verify.update import Updates

ADD = Call("aten.add.Tensor", "module first", "given", "made", has_generator=False, random_state="seeded")
TALK = replace(ADD, operator="c10d.allreduce_.default")
GENERATOR = "model.noise (a generator)"

READS = Reads(
    num_samples=40,
    samples={f"sample {index}": (f"s{index}",) * 2 for index in range(4)},
    later={f"sample {index}": f"l{index}" for index in range(4)},
    batch=["b", "b"],
    changed=[],
    opaque=[],
    others={f"sample {index}": f"s{index}" for index in range(8)},
)
PASSES = Passes(("p", "p"), ([ADD], [ADD]), changed=[], changed_parameters=[], changed_buffers=[])


def one_step(number: int = 1, **parts: dict) -> dict:
    """What was recorded of one step, in which nothing was read or computed but for these parts."""
    return {number: {**{part: {} for part in (*CHECKS, "outside", "otherwise")}, **parts}}


def evidence(where: str = "everywhere", reads: dict = {}, passes: dict = {}, **changes) -> Evidence:  # noqa: B006
    """One process twice, and two processes, that agree but for these changes.

    Args:
        where: `alone`, `again`, `rank`, `rank 1`, or everywhere.
        reads: what the processes there read otherwise.
        passes: what their passes gave otherwise.
        changes: their other weights and history, and of a `RankResult` what else is other.
    """
    processes = []
    for name in ("alone", "again", "rank 0", "rank 1"):
        is_changed = where == "everywhere" or name.startswith(where)
        probe = Probe(
            weights={"first.weight": "w"},
            reads=replace(READS, **reads) if is_changed else READS,
            passes=replace(PASSES, **passes) if is_changed else PASSES,
            history=History("", [], 20),
        )
        trace = Trace(one_step(), hidden={"model.level": "1"})
        found = RankResult(probe, trace)
        for key, value in changes.items() if is_changed else ():
            found = replace(found, **{key: value}) if hasattr(found, key) else found
            found.probe = replace(probe, **{key: value}) if hasattr(probe, key) else found.probe
        processes.append(found)
    alone, again, *several = processes
    layouts = [
        LayoutResult("1 process", [alone]),
        LayoutResult("1 again", [again]),
        LayoutResult("2 processes", several),
    ]
    for layout in layouts:
        layout.compare_with(layouts[0])
    return Evidence(layouts)


def passing_differently(one: Call = ADD, other: Call = ADD, **changes) -> dict:
    return {"results": ("p", "q"), "calls": ([one], [other]), **changes}


def calling(**changes) -> dict:
    """Two passes that part in an operator."""
    return passing_differently(ADD, replace(ADD, **changes))


def resumed(**changes) -> Evidence:
    """Two processes that went on from a checkpoint."""
    found = evidence()
    found.layouts[2].resumed = LayoutResult("2 processes, resumed", **changes)
    found.layouts[2].resumed.compare_with(found.layouts[0])
    return found


def failed() -> Evidence:
    found = evidence()
    return Evidence([*found.layouts[:2], LayoutResult("2 processes", failure="out of memory")])


def of_one_rank() -> Evidence:
    found = evidence()
    found.layouts[2].results[1].trace = Trace(one_step(weights={"first.weight": "v"}))
    found.layouts[2].results[0].trace = Trace(one_step(weights={"first.weight": "w"}))
    return found


CHANGED_SAMPLES = dict.fromkeys(READS.samples, ("x", "x"))
MOVED_SAMPLES = {f"sample {index}": (f"s{index + 4}",) * 2 for index in range(4)}


def cut(influence: str) -> CutProbe:
    return CutProbe(influence, difference=0.5, num_samples=4)


MEAN_OF_MEANS = cut("weights")
UNMERGED = {"a": (1.0, 2.0), "b": (3.0, 4.0)}
OPTIONS = Trace(one_step(optimizer={"lr of group 0": "0.2"}))
STEPS = Trace(one_step(weights={"first.weight": "v"}), changed=["task.calls"])
PARTED = Trace(STEPS.steps)
EVALUATION = Trace(one_step(evaluation={"held_out/loss": 2.0}), changed=["model.level"])
TWICE = "the same micro-batch, twice in 1 process, gives a different loss or gradient"
OF_THE_RANK = "a step depends on the rank, on the number of processes or on state that was not seen"
HIDDEN = "state outside of parameters and buffers"
UNSEEDED = "random numbers from a generator that lanewise does not seed"
OWN_GENERATOR = "a generator of random numbers that lanewise does not seed"
LEFT_OUT = "the configuration asks for results that depend on the number of devices"
NOT_SAVED = "state that a checkpoint does not hold"

CASES = [
    (
        "a sample differs from read to read",
        evidence(
            "again", reads={"samples": {**READS.samples, "sample 1": ("s1", "x")}, "changed": ["dataset.n"]}
        ),
        "sample 1, read twice in a second run of 1 process",
        "differs (1 of 4 samples); also changed: dataset.n.",
    ),
    (
        "a micro-batch differs from read to read",
        evidence("rank 1", reads={"batch": ["b", "b", "x"]}),
        "collate, called 3 times in rank 1 of 2 processes ",
    ),
    (
        "a micro-batch differs from read to read",
        evidence("alone", reads={"far": ["dataset.reads"]}),
        "the first lane's micro-batch differs when it is read in 1 process while dataset.reads is far off.",
    ),
    (
        "a sample depends on the loader's process",
        evidence("alone", reads={"batch_of_worker": "x"}),
        "the first lane's micro-batch differs between 1 process and its DataLoader worker.",
    ),
    (
        "a stream ignores its lane",
        evidence("alone", reads={"equal_lanes": [1, 3]}),
        "lanes 1 and 3 have the same samples in the first two steps.",
    ),
    (
        "samples of an epoch depend on an earlier epoch",
        evidence("again", reads={"later": {**READS.later, "sample 3": "x"}, "changed": ["dataset.cache.3"]}),
        "sample 3, read as of epoch 1, differs if it was read as of epoch 0 before; also ",
    ),
    (
        "samples depend on the process or the time",
        evidence("again", reads={"later": {**READS.later, "sample 0": "x", "sample 3": "x"}}),
        "sample 0 differs when the same process is started again.",
    ),
    (
        "the dataset shards itself by rank",
        evidence("rank 1", reads={"num_samples": 20}),
        "it has 40 samples in one process and 20 in rank 1 of 2 processes.",
    ),
    (
        "the dataset shards itself by rank",
        evidence("rank 1", reads={"samples": MOVED_SAMPLES}),
        "sample 0 in rank 1 of 2 processes equals sample 4 in one process.",
    ),
    (
        "samples depend on the rank or the number of processes",
        evidence("rank 1", reads={"samples": CHANGED_SAMPLES}),
        "sample 0 differs between rank 1 of 2 processes and one process.",
    ),
    (
        "collate depends on the process",
        evidence("again", reads={"batch": ["x", "x"]}),
        "equal samples give a different micro-batch in a second run of 1 process than in one process.",
    ),
    (
        "the initial weights depend on the process or the time",
        evidence("again", weights={"first.weight": "v"}),
        "build_model gives a different first.weight in a second run of 1 process than in the first process.",
    ),
    (
        "the initial weights depend on the rank or the number of processes",
        evidence("rank 1", weights={"first.weight": "v"}),
        "build_model gives a different first.weight in rank 1 of 2 processes than in the first process.",
    ),
    (
        "the forward depends on other processes",
        evidence("rank 0", passes={"calls": ([TALK], [TALK])}),
        "it communicates with other processes by c10d.allreduce_.default in module first ",
        "(on rank 0 of 2 processes).",
    ),
    (
        UNSEEDED,
        evidence("alone", passes=calling(inputs="x") | {"changed": [GENERATOR, "model.level"]}),
        f"{TWICE}, first in {ADD}; also changed: {GENERATOR}.",
    ),
    (
        UNSEEDED,
        evidence(passes=passing_differently(*[replace(ADD, has_generator=True, outputs=o) for o in "xy"])),
        f"{TWICE}, first in {ADD}.",
    ),
    (
        UNSEEDED,
        evidence("alone", history=History("run 9 times", ["model.count", GENERATOR], 9)),
        "the first lane's micro-batch, run 9 times, ",
        f" random state; also changed: {GENERATOR}.",
    ),
    (
        OWN_GENERATOR,
        evidence("alone", generators=GeneratorProbe([GENERATOR], [])),
        f"the first lane's micro-batch draws from {GENERATOR}, though no result was seen to differ.",
    ),
    (
        OWN_GENERATOR,
        evidence("alone", generators=GeneratorProbe(["task.a", "task.b"], ["task.c", "task.d"])),
        "the first lane's micro-batch draws from task.a, task.b, though no result was seen to differ; ",
        "nothing was seen to draw from task.c, task.d; what code that runs rarely draws cannot be seen.",
    ),
    (
        "the random state is set by the task",
        evidence(passes=calling(random_state="x", outputs="x")),
        f"{TWICE}: before {ADD}, torch's default generators are in another state.",
    ),
    (
        "an operator is not deterministic",
        evidence(passes=calling(outputs="x")),
        f"{TWICE}: {ADD} gave other outputs for equal inputs.",
    ),
    (
        HIDDEN,
        evidence("again", passes=calling(inputs="x") | {"changed": ["model.level"]}),
        "twice in a second run of 1 process, ",
        f", first in {ADD}; also changed: model.level.",
    ),
    (
        HIDDEN,
        evidence("alone", history=History("run after an evaluation", ["model.level"], 9)),
        "the first lane's micro-batch, run after an evaluation, ",
        "; also changed: model.level.",
    ),
    (
        "a value from outside of the model changes from forward to forward",
        evidence(passes=calling(inputs="x")),
        f"{TWICE}; no recorded operator made the value that differs, first in {ADD}.",
    ),
    (
        "the forward or the loss depends on the process or the time",
        evidence("again", passes={"results": ("q", "q")}),
        "gives a different loss or gradient in a second run of 1 process than in the first process.",
    ),
    (
        "the forward or the loss depends on the rank or the number of processes",
        evidence("rank 1", passes={"results": ("q", "q"), "calls": ([replace(ADD, inputs="x")],) * 2}),
        f" in rank 1 of 2 processes than in the first process, first in {ADD}.",
    ),
    (
        "a parameter is changed outside of the optimizer",
        evidence("alone", passes={"changed_parameters": ["first.weight"]}),
        "a forward and backward in 1 process changed first.weight.",
    ),
    (
        "a parameter is changed outside of the optimizer",
        evidence(trace=Trace(one_step(4, outside={"first.weight": "v"}))),
        "first.weight changed before the update of step 4 (1 process).",
    ),
    (
        "what a task does before or after an update depends on more than the step",
        evidence(trace=Trace(one_step(3, otherwise={"after_update": ["queue"]}))),
        "after_update of step 3, run again from the same state, gives a different queue (1 process).",
    ),
    (
        "the learning rate or another option of the optimizer depends on the number of processes",
        evidence("rank 0", trace=OPTIONS),
        "step 1, lr of group 0 is None in one process and 0.2 in 2 processes.",
    ),
    (
        "collate leaves samples out",
        evidence(reads={"left_out": ["sample 2"], "is_by_content": False}),
        "the first lane's micro-batch is the same without sample 2; in another order, without others.",
    ),
    (
        "the loss is a mean of means",
        evidence("alone", cut=MEAN_OF_MEANS),
        "give different gradients as one micro-batch and as several of one sample: they differ by 50.0%, ",
    ),
    (
        "the loss has a term that counts once for each micro-batch",
        evidence("alone", cut=cut("term")),
        "they differ by 50.0%, by the same amount for any samples, as with a penalty on the weights.",
    ),
    (
        "a term of the loss has weights or targets of its micro-batch",
        evidence("alone", cut=cut("targets")),
        "though a sample's outputs, and the gradient for them, don't depend on the outputs of the others.",
    ),
    (
        "a metric cannot be computed from merged states",
        evidence("alone", metrics=MetricProbe(unmerged=UNMERGED)),
        "a is 1 when one copy sees all samples, and 2 when the states of several copies are merged; b is 3 ",
    ),
    (
        "a metric is a mean of means",
        evidence("alone", metrics=MetricProbe(of_means={"a": (1.0, 2.0)})),
        "a sample that comes twice in one micro-batch counts for a as if it came once: beside ",
    ),
    (
        "gradients of equality close are farther apart than rounding explains",
        evidence("rank 0", close=CloseResult(1.5, "step 1, first.weight")),
        "step 1, first.weight differs by 1.5 times its bound in 2 processes.",
    ),
    (
        UNSEEDED,
        evidence("alone", updates=Updates("first.weight", ["optimizer.n", "optimizer.noise (a generator)"])),
        "another update from ",
        " gives another first.weight; also changed: optimizer.noise (a generator).",
    ),
    (
        NOT_SAVED,
        evidence("alone", updates=Updates("first.weight", ["optimizer.velocity"])),
        "another update ",
    ),
    (
        NOT_SAVED,
        resumed(results=[RankResult(trace=STEPS)]),
        "2 processes, resumed, diverges from the uninterrupted run",
        " at step 1, first.weight (weights); also changed: model.level.",
    ),
    (
        "a run cannot resume from a checkpoint",
        resumed(failure="no checkpoint"),
        "2 processes, resumed: no checkpoint",
    ),
    (
        HIDDEN,
        evidence("rank", trace=EVALUATION),
        "first differ in evaluation, at step 1, held_out/loss: None in one process, 2.0 there; only this is ",
        ": model.level.",
    ),
    (
        HIDDEN,
        evidence("again", passes={"results": ("q", "q")}, first=["model.mean"]),
        "1 process, where another one was the first to be computed; also changed: model.mean.",
    ),
    (
        "an evaluation changes a buffer",
        evidence("alone", history=History("", [], 9, ["scale"])),
        "evaluated after another one, gives a different loss; also changed: scale.",
    ),
    ("the run fails on another number of processes", failed(), "2 processes: out of memory"),
    (
        "the runs diverge for an unknown reason",
        evidence("again", trace=replace(STEPS, hidden={"model.level": "1"})),
        "differ in weights, at step 1, first.weight: None in one process, v there; also changed: task.",
    ),
    (
        OF_THE_RANK,
        evidence("rank", trace=PARTED),
        "differ in weights, at step 1, first.weight: None in one process, v there; ",
        "one process gives the same each time that it is started.",
    ),
    (
        "ranks hold different weights",
        of_one_rank(),
        "first.weight differs between ranks 0 and 1 of 2 processes after step 1.",
    ),
    (
        LEFT_OUT,
        replace(evidence(), left_out=["distributed.compression bf16", "distributed.x true"]),
        "it was left out of what was run: distributed.compression bf16 and distributed.x true.",
    ),
]


def test_where_all_agree_nothing_is_found():
    assert diagnose(evidence()) == []


@pytest.mark.parametrize(("cause", "found", "says"), [(cause, found, says) for cause, found, *says in CASES])
def test_each_cause_is_found_by_its_evidence(cause, found, says):
    findings = diagnose(found)
    assert [finding.cause for finding in findings] == [cause]
    assert all(part in findings[0].evidence for part in says)
    assert findings[0].remedy


def test_there_is_a_case_of_every_cause():
    assert {cause for cause, *_ in CASES} == {diagnosis.cause for diagnosis in DIAGNOSES}


def test_a_file_of_diagnoses_that_is_not_listed_is_named():
    """One that nobody imports is never tried."""
    tried = {getattr(found.find, "func", found.find).__module__ for found in DIAGNOSES}
    files = {module.name for module in iter_modules(diagnoses.__path__, f"{diagnoses.__name__}.")}
    assert files == tried


def test_of_one_kind_the_first_is_named_and_other_kinds_are_named_as_well():
    both = {"samples": {**READS.samples, "sample 1": ("s1", "x")}, "batch": ["b", "x"]}
    findings = diagnose(evidence(reads=both, cut=MEAN_OF_MEANS))
    causes = [finding.cause for finding in findings]
    assert causes == ["a sample differs from read to read", "the loss is a mean of means"]


def test_a_generator_that_a_difference_names_is_not_named_again():
    drawn = GeneratorProbe([GENERATOR], [])
    found = evidence(passes=calling(inputs="x") | {"changed": [GENERATOR]}, generators=drawn)
    assert [finding.cause for finding in diagnose(found)] == [UNSEEDED]
    unequal = {
        "samples": CHANGED_SAMPLES | {"sample 0": ("x", "y")},
        "changed": ["dataset.noise (a generator)"],
    }
    also = GeneratorProbe(["dataset.noise (a generator)"], [GENERATOR])
    findings = diagnose(evidence(reads=unequal, generators=also))
    assert [finding.cause for finding in findings] == ["a sample differs from read to read", OWN_GENERATOR]
    assert findings[1].evidence.startswith(f"nothing was seen to draw from {GENERATOR}; ")


def test_what_a_resumed_run_began_without_is_named_instead_of_what_follows_from_it():
    """The optimizer's states, which differ since the loss did, were named alone."""
    saved = {"buffer count": "1", "task.memo": "2", "task.level": "3", "optimizer.momentum": "4"}
    restored = {**saved, "buffer count": "0", "task.memo": "0", "task.level": "0"}
    found = evidence()
    found.layouts[0].results[0].trace = Trace(one_step(), hidden=saved, at_checkpoint=saved)
    other = {**saved, "task.level": "5", "optimizer.momentum": "6"}
    trace = Trace(STEPS.steps, hidden=other, at_checkpoint=restored)
    found.layouts[2].resumed = LayoutResult("2 processes, resumed", [RankResult(trace=trace)])
    found.layouts[2].resumed.compare_with(found.layouts[0])
    (finding,) = diagnose(found)
    assert finding.evidence.endswith(
        "first.weight (weights); the checkpoint did not bring back buffer count, task.level."
    )


def test_a_run_that_ends_earlier_or_later_differs_and_one_that_begins_later_need_not():
    """As where a stream gives other samples on two processes."""
    first, second = (one_step(number, loss={0: (1.0, 2.0)}, weights={"w": str(number)}) for number in (1, 2))
    reference = LayoutResult("1 process", [RankResult(trace=Trace({**first, **second}))])

    def differences(steps: dict) -> list[str]:
        layout = LayoutResult("2 processes", [RankResult(trace=Trace(steps))])
        layout.compare_with(reference)
        return [f"{part} {one}" for part, one in layout.differences.items()]

    assert differences(first) == ["loss step 2, lane 0", "weights step 2, w"]
    assert differences({**first, **second, **one_step(3, weights={"w": "3"})}) == ["weights step 3, w"]
    assert differences(second) == []


def test_what_is_a_consequence_is_not_named():
    """Layouts that part are explained by a cause; what goes on from them is still another matter."""
    assert len(diagnose(evidence("rank 0", trace=STEPS, cut=MEAN_OF_MEANS))) == 1
    found = resumed(results=[RankResult(trace=STEPS)])
    found.layouts[2].differences = found.layouts[2].resumed.differences
    assert [finding.cause for finding in diagnose(found)] == [OF_THE_RANK, NOT_SAVED]
    found.reference.updates = Updates("first.weight", [])
    assert [finding.cause for finding in diagnose(found)] == [NOT_SAVED]


def test_what_was_not_run_explains_no_difference():
    found = replace(evidence("rank", trace=PARTED), left_out=["distributed.compression bf16"])
    assert [finding.cause for finding in diagnose(found)] == [OF_THE_RANK, LEFT_OUT]
