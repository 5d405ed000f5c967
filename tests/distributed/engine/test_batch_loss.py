"""A loss of all samples of a step: its gradient is that of one graph, with the same bytes on any N."""

from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

import pytest
import torch

from lanewise import Loss
from lanewise.commands.verify.probed_run import evaluate_batch
from lanewise.config import DistributedConfig, FSDPConfig
from lanewise.engine.precision import Precision
from lanewise.engine.run.build import build_model, build_run, build_task
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.whole_loss import task_loss
from lanewise.errors import TaskError
from lanewise.processes.device.determinism import set_determinism
from lanewise.testing import run_distributed
from tests.distributed.contrastive import (
    LOSSES,
    Both,
    ByRows,
    ChangesBuffer,
    Communicates,
    Complex,
    Contrastive,
    Detached,
    Gathers,
    InContainer,
    InObject,
    Keeps,
    NotFinite,
    OfRank,
    Pooled,
    Ragged,
    clip,
)
from tests.distributed.tasks import configure, gradients, train
from tests.script import run_script
from tests.slow import slow

OWN_LOOP = Path(__file__).parents[1].joinpath("own_batch_loss.py")
CASES = [(Contrastive, {"loss": name}) for name in LOSSES] + [(ByRows, {"loss": "clip"})]


def of_cases(fast: str) -> list[object]:
    """Give the cases, of which all but that of a batch_loss by this name are slow."""
    return [
        pytest.param(
            task,
            arguments,
            marks=() if task is Contrastive and arguments["loss"] == fast else pytest.mark.slow,
        )
        for task, arguments in CASES
    ]


def with_either_task(layouts, fast=(Contrastive, ByRows)):
    """Give each layout with both tasks, of which `make test` runs one: these in turns."""
    return [
        pytest.param(*layout, task, marks=() if task is fast[number % 2] else pytest.mark.slow)
        for number, layout in enumerate(layouts)
        for task in (Contrastive, ByRows)
    ]


@pytest.mark.parametrize(("task", "arguments"), of_cases("nt_xent"), ids=str)
def test_bytes_do_not_depend_on_the_number_of_processes(task, arguments):
    config = configure(task, **arguments)
    (alone,) = run_distributed(train, 1, config)
    for world_size in (2, 3, 4):
        for result in run_distributed(train, world_size, config):
            assert result == alone


def by_hand(world, config):
    """Train with one graph over the whole batch; return the gradients of each step."""
    set_determinism("exact", threads=1)
    run = build_run(config, world)
    model, optimizer, task = run.training.model, run.training.optimizer, run.runner.task
    whole = task_loss(run.runner)
    seen = []
    for _, lanes in groupby(run.loader.batches(0, run.last_step), lambda batch: batch.turn.step):
        outputs, inputs = [], []
        for batch in lanes:
            outputs.append(whole.forward_of(batch)(model, batch.data))
            inputs.append(task.batch_loss_inputs(batch.data))
        joined = {key: torch.cat([one[key] for one in outputs]) for key in outputs[0]}
        labels, rows = torch.cat(inputs), slice(0, len(joined["first"]))
        returned = whole.compute(model, (joined, labels), rows)
        (returned.sum / returned.weight if isinstance(returned, Loss) else returned).backward()
        named = list(model.named_parameters())
        seen.append({n: torch.zeros_like(one) if one.grad is None else one.grad.clone() for n, one in named})
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(("task", "arguments"), of_cases("dice"), ids=str)
def test_gradients_are_those_of_one_graph_over_the_whole_batch(task, arguments):
    config = configure(task, **arguments, double=True, optimizer="torch.optim.SGD", lr=0.05)
    (expected,) = run_distributed(by_hand, 1, config)
    assert len(expected) == 5
    for world_size in (1, 3):
        for found in run_distributed(gradients, world_size, config):
            for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                assert mine.keys() == theirs.keys()
                for name, value in mine.items():
                    assert (value - theirs[name]).abs().max() < 1e-12, (step, name)


def test_without_batch_norm_the_gradient_does_not_depend_on_the_micro_batch():
    found = [
        run_distributed(
            gradients,
            1,
            configure(
                Contrastive,
                num_lanes=16 // size,
                micro_batch_size=size,
                loss="nt_xent",
                dropout=0.0,
                double=True,
                optimizer="torch.optim.SGD",
            ),
        )[0]
        for size in (1, 4, 16)
    ]
    for steps in zip(*found, strict=True):
        for name, value in steps[0].items():
            assert all((other[name] - value).abs().max() < 1e-12 for other in steps[1:]), name


def configured(reducer, num_devices, *, task=Contrastive, precision="float32", equality="exact", **arguments):
    """A run on a reducer; the lanes are 8, but for a configuration that says otherwise."""
    lanes = {"num_lanes": arguments.pop("num_lanes", 8)}
    config = configure(task, precision=precision, **lanes, **{"norm": reducer != "fsdp", **arguments})
    distributed = DistributedConfig(
        reducer=reducer,
        devices=num_devices,
        device_type="cpu",
        equality=equality,
        fsdp=FSDPConfig(blocks=("Linear",)) if reducer == "fsdp" else FSDPConfig(),
    )
    return replace(config, distributed=distributed)


def run(config, function=train, *arguments):
    results = run_distributed(function, config.distributed.num_processes or 1, config, *arguments)
    assert all(result == results[0] for result in results)
    return results[0]


LAYOUTS = [
    ("ddp", 3, "fp16"),
    ("data_parallel", 2, "float32"),
    ("balanced_data_parallel", 3, "bf16"),
    ("fsdp", 3, "bf16"),
]
SLOW_LAYOUTS = [
    pytest.param(*layout, task, marks=pytest.mark.slow)
    for layout in (("ddp", 2, "bf16"), ("fsdp", 2, "float32"))
    for task in (Contrastive, ByRows)
]


@pytest.mark.parametrize(
    ("reducer", "num_devices", "precision", "task"), [*with_either_task(LAYOUTS), *SLOW_LAYOUTS]
)
def test_each_reducer_leaves_the_bytes_of_one_device(reducer, num_devices, precision, task):
    arguments = {"task": task, "precision": precision, "loss": "clip", "norm": reducer != "fsdp"}
    alone = run(configured("single", 1, **arguments))
    assert run(configured(reducer, num_devices, **arguments)) == alone


@pytest.mark.parametrize(
    ("reducer", "task"),
    [
        ("ddp", ByRows),
        ("data_parallel", Contrastive),
        *slow(
            ("ddp", Contrastive),
            ("data_parallel", ByRows),
            *product(("balanced_data_parallel", "fsdp"), (ByRows, Contrastive)),
        ),
    ],
)
def test_with_one_lane_for_each_device_graphs_are_kept_with_the_same_bytes(reducer, task):
    arguments = {"task": task, "loss": "clip", "num_lanes": 3, "norm": reducer != "fsdp"}
    assert run(configured(reducer, 3, **arguments)) == run(configured("single", 1, **arguments))


@pytest.mark.parametrize(
    ("reducer", "task"),
    [("ddp", Contrastive), *slow(("ddp", ByRows), ("fsdp", Contrastive), ("fsdp", ByRows))],
)
def test_close_is_near(reducer, task):
    _, expected = run(configured("single", 1, task=task, loss="clip", norm=False))
    _, losses = run(configured(reducer, 3, task=task, loss="clip", norm=False, equality="close"))
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert losses == pytest.approx(expected, rel=1e-2)


def test_an_own_loop_leaves_the_same_bytes_on_any_number_of_processes(tmp_path):
    found = []
    for num_processes in (1, 2, 3):
        folder = tmp_path / f"{num_processes}"
        folder.mkdir()
        printed = run_script(OWN_LOOP, "model.safetensors", cwd=folder, num_processes=num_processes)
        found.append((printed, (folder / "model.safetensors").read_bytes()))
    assert found[1:] == found[:1] * 2
    assert len(found[0][0].splitlines()) == 8


@pytest.mark.parametrize("task", [*slow(Complex), InContainer])
def test_outputs_may_be_complex_or_in_containers_or_empty(task):
    alone = run(configured("single", 1, task=task, loss="clip"))
    assert run(configured("ddp", 3, task=task, loss="clip")) == alone
    assert run(configured("balanced_data_parallel", 2, task=task, loss="clip")) == alone


def test_complex_gradients_are_those_of_one_graph():
    config = configure(Complex, double=True, optimizer="torch.optim.SGD", lr=0.05)
    (expected,) = run_distributed(by_hand, 1, config)
    (found,) = run_distributed(gradients, 1, config)
    for mine, theirs in zip(found, expected, strict=True):
        assert max((mine[name] - value).abs().max() for name, value in theirs.items()) < 1e-12


def evaluate(world, config):
    task = build_task(config)
    runner = LaneRunner(task, Precision("float32", "cpu"), 0)
    model = build_model(task, 0)
    return evaluate_batch(runner, model, {"test": task.train_dataset()}, world, config)


@pytest.mark.parametrize("task", [*slow(Contrastive), ByRows])
def test_evaluation_makes_a_batch_of_the_micro_batches_of_all_lanes(task):
    config = configure(task, loss="clip", dropout=0.0, double=True, micro_batch_size=7)
    (alone,) = run_distributed(evaluate, 1, config)
    for world_size in (2, 3, 4):
        assert run_distributed(evaluate, world_size, config) == [alone] * world_size
    built = task("clip", dropout=0.0, double=True)
    torch.manual_seed(0)
    model = build_model(built, 0).eval()
    # evaluate_batch takes 56 samples at most, all 53 here: 7 for each lane but the last three, which have 6.
    outputs = built.forward(model, (torch.stack([one for one, _ in built.train_dataset()]),))
    assert alone["test/loss"] == pytest.approx(clip(model, outputs, None).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Detached, "the batch_loss of Detached: the outputs of the lanes have no gradient"),
        (Pooled, r"do not make one batch:\n  lane 0: .*\[1 of 2 samples, 8\] float32 with a gradient"),
        (Ragged, r"do not make one batch:\n  lane \d: .*\[samples, \d\].*\n  lane \d: .*\[samples, \d\]"),
        (OfRank, r"the batch_loss of OfRank differs between processes, .*: \[\d"),
        (Gathers, "the batch_loss of Gathers communicates with other processes"),
        (Keeps, r"lane \d of step 1 gave other outputs when its forward ran a second time"),
        (ChangesBuffer, "the batch_loss of ChangesBuffer changes the buffer seen"),
        (InObject, "has an object of type Opaque, whose samples cannot be separated"),
        (Communicates, "communicated with other processes, so its result depends on their number"),
        (
            NotFinite,
            r"the loss is not finite in step 1 .*\n  lane \d: outputs that are not finite, samples \[",
        ),
    ],
)
def test_wrong_use_is_one_clear_error(task, said):
    with pytest.raises(RuntimeError, match=said):
        run_distributed(train, 2, configure(task))


def test_a_task_has_one_loss():
    with pytest.raises(TaskError, match=r"must have exactly one of the methods .*: got loss and batch_loss"):
        Both().loss_method()
