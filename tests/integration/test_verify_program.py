"""`lanewise verify -- PROGRAM` names what public scripts do wrong, and finds nothing where they are right."""

import json
import sys
from pathlib import Path

import pytest

from tests.integration.command import lanewise
from tests.slow import slow

PROGRAMS = Path(__file__).parent / "programs"
EVEN = ("--rows", "{per_process:16}")
OF_LIGHTNING = (*EVEN, "--devices", "{processes}", "--folder", "{folder}")
OF_TRANSFORMERS = ("--rows", "{per_process:8}", "--folder", "{folder}")
PATIENCE_SECONDS = 300


def verify(tmp_path, program, *arguments, until=""):
    """Return what is written as JSON, with what is not told by one number of processes left out."""
    if program != "plain":
        pytest.importorskip(program.removeprefix("with_"))
    options = ("--until", until) if until else ()
    # Warnings are errors in ours, and libraries warn.
    command = ("env", "-u", "PYTHONWARNINGS", sys.executable, PROGRAMS / f"{program}.py", *arguments)
    done = lanewise(
        *("verify", "--devices", "1,2", "--steps", "2", "--json", tmp_path / "report.json", *options),
        *("--", *command),
        cwd=tmp_path,
        patience_seconds=PATIENCE_SECONDS,
    )
    assert done.leftover == []
    written = json.loads((tmp_path / "report.json").read_text())
    assert done.code == (0 if written["verified"] else 1)
    (layout,) = written["layouts"]
    assert written["verified"] == (not layout["findings"] and not layout["not_compared"])
    return done.stdout, layout


def causes(layout):
    return [finding["cause"] for finding in layout["findings"]]


def test_a_mean_of_token_means_is_explained_by_what_each_rank_counted(tmp_path):
    shown, layout = verify(tmp_path, "plain", *EVEN, "--fault", "token_mean")
    assert causes(layout) == ["the loss is a mean of means"]
    shares = layout["comparisons"][0]["shares"]
    counts = layout["comparisons"][0]["counts"]["[1] that are not -100"]
    assert shares == pytest.approx([count / sum(counts) for count in counts], abs=1e-4)
    assert f"as {counts[0]} to {counts[1]} is the proportion of [1] that are not -100" in shown
    assert shown.splitlines()[-1] == "not verified: 1 cause found"


RIGHT = [
    ("plain", "", ()),
    ("plain", "", ("--accumulate", "2", "--fault", "syncs_always")),
    ("plain", "", ("--accumulate", "2", "--workers", "2", "--fault", "augmented")),
    ("plain", "", ("--fault", "averaged")),
    ("plain", "", ("--fault", "needs_torchrun")),
    ("plain", "", ("--fault", "subset")),
    ("plain", "", ("--fault", "compiled")),
    ("plain", "", ("--fault", "sliced")),
    ("plain", "", ("--fault", "shares")),
    ("with_accelerate", "", ("--accumulate", "2")),
    ("with_lightning", "", ("--accumulate", "2")),
    ("with_transformers", "", ("--model", "gpt2", "--accumulate", "2")),
]
"""Programs that are right, of which nothing is said."""


@pytest.mark.parametrize(("program", "until", "arguments"), slow(*RIGHT))
def test_of_a_right_program_nothing_is_found(tmp_path, program, until, arguments):
    shown, layout = verify(tmp_path, program, *always(program), *arguments, until=until)
    assert (causes(layout), layout["not_compared"]) == ([], "")
    assert [f"{update['factor']:.4f}" for update in layout["comparisons"]] == ["1.0000", "1.0000"]
    assert shown.splitlines()[-1] == (
        "verified: the gradients are those of one process; not looked at: the order of a second epoch "
        "(--until epoch), evaluations (--until evaluation)"
    )


def always(program):
    """Return the arguments that a program is always given."""
    return {"with_lightning": OF_LIGHTNING, "with_transformers": OF_TRANSFORMERS}.get(program, EVEN)


WRONG = [
    ("plain", "", ("--accumulate", "2", "--fault", "no_sync"), "the ranks' gradients are not reduced"),
    ("plain", "", ("--fault", "unwrapped"), "the ranks' gradients are not reduced"),
    ("plain", "", ("--fault", "sum"), "the gradient is 2 times too small"),
    ("plain", "", ("--fault", "global_count"), "the gradient is 2 times too small"),
    ("plain", "", ("--fault", "added"), "the gradient is 2 times too large"),
    ("plain", "", ("--fault", "shuffle_by_rank"), "ranks read the same samples"),
    ("plain", "epoch", ("--fault", "sampler_seed"), "ranks read the same samples"),
    ("plain", "epoch", ("--fault", "split_by_rank"), "ranks read the same samples"),
    ("plain", "epoch", ("--fault", "set_epoch"), "every epoch has the same order"),
    ("plain", "epoch", ("--fault", "set_epoch_on_one"), "every epoch has the same order"),
    ("plain", "", ("--fault", "alone"), "the processes do not train together"),
    ("plain", "", ("--fault", "own_loader"), "ranks read the same samples"),
    ("plain", "", ("--fault", "drawn"), "each rank has a data set of its own"),
    ("with_accelerate", "", ("--fault", "token_mean"), "the loss is a mean of means"),
    ("with_accelerate", "", ("--fault", "not_prepared"), "ranks read the same samples"),
    ("with_lightning", "", ("--fault", "token_mean"), "the loss is a mean of means"),
    ("with_lightning", "", ("--fault", "own_sampler"), "ranks read the same samples"),
    ("with_transformers", "", ("--model", "gpt2", "--fault", "token_mean"), "the loss is a mean of means"),
    ("with_transformers", "", ("--model", "bert"), "the gradient is 2 times too large"),
    ("with_transformers", "", ("--model", "masked"), "the gradient is 2 times too large"),
]
"""Programs with a mistake, and the only cause that is found."""


@pytest.mark.parametrize(("program", "until", "arguments", "cause"), slow(*WRONG))
def test_the_mistake_of_a_program_is_named(tmp_path, program, until, arguments, cause):
    _, layout = verify(tmp_path, program, *always(program), *arguments, until=until)
    assert causes(layout) == [cause]


NOTED = [
    ("plain", "", ("--fault", "scheduler"), "the learning rate differs from update 2 on: 0.0081 on 2"),
    (
        "plain",
        "epoch",
        ("--fault", "drop_last"),
        "the first epoch leaves out 7 samples, and 7 on one process",
    ),
    ("plain", "evaluation", (), "the evaluation reads 1 of 71 samples twice, as padding"),
    ("with_accelerate", "evaluation", (), "the evaluation reads 10 of 70 samples twice, as padding"),
    ("with_lightning", "evaluation", (), "the evaluation reads 1 of 71 samples twice, as padding"),
]
"""Programs that do otherwise on two processes than on one, which may be right."""


@pytest.mark.parametrize(("program", "until", "arguments", "noted"), slow(*NOTED))
def test_what_may_be_right_is_said_and_is_no_mistake(tmp_path, program, until, arguments, noted):
    shown, layout = verify(tmp_path, program, *always(program), *arguments, until=until)
    assert causes(layout) == []
    assert f"note, 2 processes, each with the samples that it reads itself: {noted}" in shown


UNTOLD = [
    ("fsdp", "sharded parameters, as FSDP has"),
    ("zero", "ZeroRedundancyOptimizer"),
    ("in_backward", "an optimizer that updates within the backward"),
    ("stream", "the samples of a stream"),
    ("data_parallel", "DataParallel in one process"),
    ("deepspeed", "DeepSpeed"),
    ("draws", "of 16 rows that entered the model in update 1 on 2 processes"),
    ("by_hand", "an update of its weights by hand"),
]


@pytest.mark.parametrize(("fault", "why"), slow(*UNTOLD))
def test_what_cannot_be_told_is_named(tmp_path, fault, why):
    shown, layout = verify(tmp_path, "plain", *EVEN, "--fault", fault)
    assert why in layout["not_compared"]
    assert shown.splitlines()[-1] == "not verified: the gradients could not be compared"


@pytest.mark.slow  # tests/unit/commands/verify/foreign/test_program.py shows it without torchrun
def test_a_program_that_fails_is_shown_with_its_last_lines(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('no data')\n")
    done = lanewise("verify", "--", sys.executable, "train.py", cwd=tmp_path)
    assert (done.code, done.leftover) == (1, [])
    assert "error: 1 process of the program ended with code 1, and no update of an optimizer" in done.stderr
    assert "ValueError: no data" in done.stderr


@pytest.mark.slow
def test_a_program_that_fails_in_its_second_update_is_no_end_of_its_own(tmp_path):
    """It was: the observer ended the process with 0 while it was on its way out, and saw too little."""
    program = (sys.executable, PROGRAMS / "plain.py", *EVEN, "--fault", "fails")
    command = ("env", "-u", "PYTHONWARNINGS", *program)
    done = lanewise("verify", "--", *command, cwd=tmp_path, patience_seconds=PATIENCE_SECONDS)
    assert (done.code, done.leftover) == (1, [])
    assert "1 process of the program ended with code 1, and not all that was to be observed" in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "1", "--", "x"], "verify compares with one process: got --devices 1."),
        (["run.yaml", "--", "x"], "verify takes a configuration or a program: got run.yaml and -- too."),
        (["--resume", "--", "x"], "verify takes a configuration or a program: got --resume and -- too."),
        (["run.yaml", "--until", "epoch"], "--until is of a program that follows --: got a configuration."),
        (["--until", "noon", "--", "x"], "--until must be epoch or evaluation: got 'noon'."),
        (["--"], "-- needs the program that follows it: got none."),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, arguments, said):
    done = lanewise("verify", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert said in done.errors[0]
