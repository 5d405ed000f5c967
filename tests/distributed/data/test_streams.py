"""Streams leave the bytes of one device on any number, under each reducer, and when a run resumes."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import lanewise
from lanewise import Loss
from lanewise.config import OrderConfig, RunConfig, SchedulerConfig
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.errors import CheckpointError, ConfigError, DataError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.reduce.test_reducers import EACH_REDUCER, IN_PROCESS, configured, run, train_part
from tests.distributed.streams import KINDS, Lanes, LanesWithState, Streaming
from tests.distributed.tasks import state_bytes
from tests.script import run_script
from tests.slow import slow
from tests.unit.data.streams import Cursor

OWN_LOOP = Path(__file__).parents[1].joinpath("own_stream.py")
CPU = torch.device("cpu")


def streaming(
    reducer: str = "single", num_devices: int = 1, kind: str = "Lanes", **options: Any
) -> RunConfig:
    data = {name: options.pop(name) for name in ("shuffle_buffer", "num_workers") if name in options}
    config = configured(reducer, num_devices, task=Streaming, **{"steps": 9, **options})
    task = replace(config.task, init_args={"kind": kind})
    return replace(config, task=task, data=replace(config.data, **data))


@cache
def single(kind: str, **options: Any) -> Any:
    return run(streaming(kind=kind, **options))


@pytest.mark.parametrize(
    ("reducer", "num_devices", "kind", "precision"),
    [
        ("ddp", 3, "Plain", "bf16"),
        ("data_parallel", 2, "Plain", "float32"),
        ("balanced_data_parallel", 3, "Lanes", "float32"),
        *slow(
            ("fsdp", 3, "Lanes", "float32"),
            ("ddp", 2, "Lanes", "float32"),
            ("ddp", 4, "Lanes", "bf16"),
            ("ddp", 4, "Plain", "float32"),
            ("balanced_data_parallel", 4, "Plain", "bf16"),
            ("fsdp", 2, "Plain", "bf16"),
            ("fsdp", 4, "Plain", "float32"),
        ),
    ],
)
def test_every_reducer_leaves_the_bytes_and_losses_of_one_device(reducer, num_devices, kind, precision):
    """Nine steps, of which six are an epoch of the lane-aware stream: lanes end in the middle of both."""
    config = streaming(reducer, num_devices, kind, precision=precision)
    assert run(config) == single(kind, precision=precision)


@pytest.mark.parametrize("reducer", ["ddp", *slow(*IN_PROCESS, "fsdp")])
def test_close_is_near(reducer):
    state, losses = run(streaming(reducer, 3, equality="close"))
    _, expected = single("Lanes")
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-2)
    assert state


@pytest.mark.parametrize("kind", ["Lanes", *slow("Plain")])
def test_loader_workers_and_processes_change_nothing_of_what_is_shuffled(kind):
    options = {"shuffle_buffer": 5}
    alone = single(kind, **options)
    assert run(streaming("ddp", 2, kind, num_workers=2, **options)) == alone
    assert alone != single(kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shuffle_buffer"), [*product(KINDS, (0, 6))])
def test_each_reducer_goes_on_from_the_checkpoint_of_another(tmp_path, kind, shuffle_buffer):
    whole, _ = single(kind, shuffle_buffer=shuffle_buffer)
    turn = 2 * list(KINDS).index(kind) + bool(shuffle_buffer)
    saved, resumed = (EACH_REDUCER[(turn + more) % len(EACH_REDUCER)] for more in (0, 1))
    for first in (5, 6):  # within the first epoch, and at its end
        folder = str(tmp_path / f"{first}")
        run(streaming(*saved, kind, shuffle_buffer=shuffle_buffer), train_part, folder, first)
        config = streaming(*resumed, kind, shuffle_buffer=shuffle_buffer)
        assert run(config, train_part, folder, 9) == whole, (saved, resumed)


class Careless(Streaming):
    """Changes its batches, and has a second loss, without weight where lanes have one sample left."""

    def forward(self, model: Any, batch: torch.Tensor) -> Any:
        assert (batch >= 0).all(), "a forward changed it before"
        outputs = super().forward(model, batch.clone())
        batch.neg_()
        return outputs

    def loss(self, outputs: Any, batch: torch.Tensor) -> Any:
        num_counted = 2 * (len(batch) == 2)
        return [super().loss(outputs, -batch), Loss(outputs.pow(2).mean() * num_counted, num_counted)]

    def loss_weights(self, batch: torch.Tensor) -> None:
        return None


def test_a_process_that_repeats_a_batch_of_an_earlier_step_changes_nothing():
    """Six steps, in the last of which one process of two has no samples, and the other a single one."""
    alone, sharded = (run(configured(*one, task=Careless)) for one in (("single", 1), ("fsdp", 2)))
    assert sharded == alone


def fit(world: World, config: RunConfig, folder: str) -> Any:
    """Train as the command does, and go on where a run in the folder was."""
    set_determinism("exact", threads=1)
    run_dir = RunDir(Path(folder))
    built = build_run(config, world)
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(built, checkpoints, allow=("lanes", "dataset"))
    lines: list[tuple[int, int]] = []

    class Lines(lanewise.Callback):
        def on_step(self, epoch: int, step: int, metrics: Any) -> None:
            assert metrics["perf/samples_per_second"] > 0
            lines.append((epoch, step))

    engine = Engine(built, first_step=first_step, saving=Saving(built, checkpoints))
    engine.fit(run_dir, [Lines()])
    return state_bytes(engine.training.model), engine.next_step, lines


def of_epochs(num_epochs: int, num_devices: int = 1, **changes: Any) -> RunConfig:
    config = streaming("ddp", num_devices)
    train = replace(config.train, max_steps=None, epochs=num_epochs)
    return replace(config, train=train, log=replace(config.log, every_steps=4), **changes)


@pytest.mark.parametrize("num_devices", [1, *slow(3)])
def test_epochs_end_when_the_stream_does_and_more_of_them_go_on(tmp_path, num_devices):
    once = run_distributed(fit, num_devices, of_epochs(3, num_devices), str(tmp_path / "once"))[0]
    assert once[1] == 18
    assert once[2] == [(1, 1), (1, 4), (2, 8), (2, 12), (3, 16), (3, 18)]
    folder = str(tmp_path / "parts")
    part = run_distributed(fit, num_devices, of_epochs(1, num_devices), folder)[0]
    assert part[1:] == (6, [(1, 1), (1, 4), (1, 6)])
    again = fit(LocalWorld(CPU), of_epochs(1), folder)
    assert again[:2] == part[:2]
    rest = fit(LocalWorld(CPU), of_epochs(3), folder)
    assert rest == (once[0], 18, [(2, 8), (2, 12), (3, 16), (3, 18)])
    with pytest.raises(
        CheckpointError, match=r"in epoch 3 of the stream, and this run has 2\. Raise train.epochs"
    ):
        fit(LocalWorld(CPU), of_epochs(2), folder)


def test_other_lanes_cannot_go_on_even_where_that_is_allowed(tmp_path):
    config = of_epochs(2)
    stopped = replace(config, train=replace(config.train, max_steps=3))
    fit(LocalWorld(CPU), stopped, str(tmp_path))
    batch = replace(config.batch, micro_batch_size=4)
    with pytest.raises(CheckpointError, match=r"was cut into 8 lanes, micro-batches of 2 .* is into 4 lanes"):
        fit(LocalWorld(CPU), replace(config, batch=batch), str(tmp_path))


@pytest.mark.parametrize(
    "scheduler",
    [
        SchedulerConfig(name="cosine"),
        SchedulerConfig(warmup=0.1),
        SchedulerConfig(class_path="torch.optim.lr_scheduler.CosineAnnealingLR", init_args={"T_max": "auto"}),
    ],
)
def test_what_needs_the_length_of_the_run_asks_for_max_steps(scheduler):
    with pytest.raises(ConfigError, match=r"needs the number of steps .* Set train.max_steps"):
        build_run(of_epochs(2, scheduler=scheduler), LocalWorld(CPU))
    config = of_epochs(2, scheduler=scheduler)
    build_run(replace(config, train=replace(config.train, max_steps=9)), LocalWorld(CPU))


def test_a_warm_up_of_so_many_steps_needs_no_length():
    engine = build_engine(of_epochs(1, scheduler=SchedulerConfig(warmup=3)), LocalWorld(CPU))
    rates = [engine.training.optimizer.param_groups[0]["lr"] for _ in engine.steps()]
    assert rates == pytest.approx([0.005, 0.0075, 0.01, 0.01, 0.01, 0.01])


class Unsavable(Streaming):
    """A stream whose state is an object."""

    def train_dataset(self) -> Any:
        stream = LanesWithState()

        class Odd(Cursor):
            def state_dict(self) -> dict[str, Any]:
                return {"place": object()}

        stream.iter_lane = lambda *_: Odd([torch.ones(3)] * 9)
        return stream


def test_a_state_that_no_checkpoint_can_hold_is_an_error_before_the_first_step():
    with pytest.raises(CheckpointError, match=r"LanesWithState/place cannot be saved: it is a builtins"):
        build_run(configured("single", 1, task=Unsavable), LocalWorld(CPU))


class OneShot(Streaming):
    """A stream whose iterator is made once, which only a second read shows."""

    def train_dataset(self) -> Any:
        stream, iterator = Lanes(), iter([torch.full((3,), 1 + number) for number in range(9)])
        stream.iter_lane = lambda *_: iterator
        return stream


class EvaluatesOneShot(Streaming):
    """Evaluates such a stream."""

    def eval_datasets(self) -> dict[str, Any]:
        return {"val": OneShot().train_dataset()}


@pytest.mark.parametrize(
    ("task", "what"), [(OneShot, "the training dataset"), (EvaluatesOneShot, "eval dataset val")]
)
def test_a_stream_that_does_not_begin_anew_is_an_error_before_the_first_step(task, what):
    with pytest.raises(DataError, match=f"{what} begins with another sample when it is opened a second time"):
        build_run(configured("single", 1, task=task), LocalWorld(CPU))


class OfRank(Streaming):
    """A stream that knows its rank."""

    def train_dataset(self) -> Any:
        rank = torch.distributed.get_rank()
        stream = Lanes()
        stream.iter_lane = lambda *_: iter([torch.full((3,), 1 + rank)] * 9)
        return stream


def build(world: World, config: RunConfig) -> str:
    with pytest.raises(DataError) as error:
        build_run(config, world)
    return str(error.value)


def test_a_stream_that_knows_its_rank_is_an_error_before_the_first_step():
    for told in run_distributed(build, 2, configured("ddp", 2, task=OfRank)):
        assert "see different streams: they begin in lanes 0 and 0 with samples of digests" in told


def test_an_order_is_for_a_dataset_with_an_index_and_a_buffer_for_a_stream():
    config = of_epochs(1)
    ordered = replace(config.data, order=OrderConfig(class_path="shuffled"))
    with pytest.raises(ConfigError, match=r"got lanewise.lanes.ShuffledOrder for Lanes, a stream"):
        build_run(replace(config, data=ordered), LocalWorld(CPU))
    map_style = configured("single", 1)
    buffered = replace(map_style, data=replace(map_style.data, shuffle_buffer=9))
    with pytest.raises(ConfigError, match=r"shuffle_buffer is for streams: got 9 for Sentences"):
        build_run(buffered, LocalWorld(CPU))


@pytest.mark.parametrize("kind", [*slow("Lanes"), "PlainWithState"])
def test_an_own_loop_goes_on_on_another_number_of_processes(tmp_path, kind):
    def loop(name: str, *parts: tuple[int, int]) -> list[str]:
        """Run the loop up to each of the steps, on so many processes; return what it printed."""
        folder = tmp_path / name
        folder.mkdir()
        printed: list[str] = []
        for num_processes, last_step in parts:
            arguments = folder, kind, last_step
            output = run_script(OWN_LOOP, *arguments, cwd=folder, num_processes=num_processes)
            printed += output.splitlines()
        return printed

    whole = loop("whole", (1, 15))
    assert len(whole) == 15
    assert loop("parts", (2, 5), (3, 12), (1, 15)) == whole
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert models[0] == models[1]
