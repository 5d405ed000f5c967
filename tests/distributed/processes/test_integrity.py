"""Digests of the state: one flipped bit is found where it is, and nothing else ever is."""

import dataclasses
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.config import (
    CheckpointConfig,
    DistributedConfig,
    EvaluateConfig,
    EveryConfig,
    FSDPConfig,
    IntegrityConfig,
    RunConfig,
)
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.errors import WorldError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.device.nested import tensors_in
from lanewise.processes.world.digests import gather_digests
from lanewise.processes.world.shards import is_sharded
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest, write_durably
from lanewise.runs.dir import RunDir
from lanewise.runs.loggers.jsonl import JsonlLogger
from lanewise.testing import run_distributed
from tests.distributed.reduce.test_reducers import FAST, LAYOUTS, Whole
from tests.distributed.tasks import configure
from tests.slow import slow

STEPS = 7
TIED = ("head.weight", "embedding.weight"), ("embedding.weight", "head.weight")
DUE = (3, 6, 7)
"""After which steps there is a line: each third, and the last."""


class Evaluated(Whole):
    """With a table that no state dict has, and an evaluation, which runs BatchNorm with what was trained."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("table", torch.arange(8), persistent=False)
        return model

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"test": self.train_dataset()}


def configured(
    reducer: str = "ddp",
    num_devices: int = 1,
    precision: str = "float32",
    equality: str = "exact",
    every: int | None = 3,
    optimizer: str = "torch.optim.AdamW",
    **more: Any,
) -> RunConfig:
    config = configure(Evaluated, steps=STEPS, precision=precision, optimizer=optimizer)  # type: ignore[arg-type]
    distributed = DistributedConfig(
        fsdp=FSDPConfig(blocks=("TransformerEncoderLayer",)),
        reducer=reducer,  # type: ignore[arg-type]
        devices=num_devices,
        device_type="cpu",
        equality=equality,  # type: ignore[arg-type]
        **more,
    )
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, ema_decay=0.9),
        evaluate=EvaluateConfig(every_steps=2),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=2), keep_last=9),
        integrity=IntegrityConfig(digest_every_steps=every),
        distributed=distributed,
    )


def fit(world: Any, config: RunConfig, folder: str, last_step: int = STEPS) -> None:
    set_determinism(config.distributed.equality, threads=1)
    run_dir = RunDir(Path(folder))
    run = dataclasses.replace(build_run(config, world), last_step=last_step)
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, ())
    loggers = [JsonlLogger(run_dir.metrics, first_step)] if world.rank == 0 else []
    Engine(run, first_step=first_step, saving=Saving(run, checkpoints)).fit(run_dir, loggers)
    world.all_gather_tree(None)


def train(config: RunConfig, folder: Path, last_step: int = STEPS) -> None:
    run_distributed(fit, config.distributed.num_processes or 1, config, str(folder), last_step)


def written(folder: Path) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the digests of the lines and those of the checkpoints, by step."""
    lines = map(json.loads, RunDir(folder).metrics.read_text().splitlines())
    of_lines = {line["step"]: line["digests"] for line in lines if line.get("event") == "digests"}
    manifests = map(Manifest.read, CheckpointFolder(RunDir(folder).checkpoints).all())
    return of_lines, {manifest.step: dict(manifest.digests) for manifest in manifests}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each precision writes on one device."""
    folders = {precision: tmp_path_factory.mktemp(precision) for precision in ("float32", "bf16")}
    for precision, folder in folders.items():
        train(configured("single", precision=precision), folder)
    return {precision: written(folder) for precision, folder in folders.items()}


def test_lines_and_checkpoints_have_the_digests_of_all_that_changes(alone):
    of_lines, of_checkpoints = alone["float32"]
    assert tuple(of_lines) == DUE
    assert sorted(of_checkpoints) == [2, 4, 6, 7]
    assert of_lines[7] == of_checkpoints[7]  # between which it was evaluated
    assert of_lines[6] == of_checkpoints[6]
    names = [
        *("model/sometimes", "model/norm.running_mean", "model/norm.num_batches_tracked"),
        *("optimizer/state/model.never/exp_avg", "average/module.sometimes"),
    ]
    assert set(names) <= of_lines[7].keys()
    trained = [name for name in of_lines[7] if "num_batches" not in name and not name.endswith("/step")]
    same = {name for name in trained if of_lines[3][name] == of_lines[7][name]}
    assert same <= {name for name in trained if "/model.never/" in name}  # whose gradient is zero


@pytest.mark.parametrize(
    ("reducer", "num_devices", "precision"),
    [
        pytest.param(
            *(reducer, num, precision),
            marks=() if (reducer, num, precision) in FAST - {("ddp", 3, "bf16")} else pytest.mark.slow,
        )
        for reducer, num in LAYOUTS
        for precision in ("float32", "bf16")
    ],
)
def test_they_are_the_same_on_any_devices(alone, tmp_path, reducer, num_devices, precision):
    train(configured(reducer, num_devices, precision), tmp_path)
    assert written(tmp_path) == alone[precision]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("fsdp", 2), ("ddp", 3)),
        *slow((("ddp", 1), ("fsdp", 3)), (("data_parallel", 4), ("ddp", 2)), (("ddp", 4), ("fsdp", 2))),
    ],
)
def test_a_resume_elsewhere_finds_what_was_saved_and_writes_the_same(alone, tmp_path, first, then):
    train(configured(*first), tmp_path, last_step=5)
    train(configured(*then), tmp_path)
    of_lines, of_checkpoints = written(tmp_path)
    assert {step: of_lines[step] for step in DUE} == alone["float32"][0]
    assert of_checkpoints.items() >= alone["float32"][1].items()


def test_a_sharded_optimizer_has_the_digests_of_a_whole_one(alone, tmp_path):
    train(configured("ddp", 3, shard_optimizer=True), tmp_path)
    assert written(tmp_path) == alone["float32"]


@pytest.mark.parametrize(
    ("reducer", "num_devices", "precision"),
    [("ddp", 3, "float32"), *slow(("ddp", 2, "bf16"), ("ddp", 4, "fp16"), ("fsdp", 3, "float32"))],
)
def test_replicas_are_equal_in_close_too(tmp_path, reducer, num_devices, precision):
    train(configured(reducer, num_devices, precision, equality="close", every=1), tmp_path)
    assert tuple(written(tmp_path)[0]) == tuple(range(1, STEPS + 1))


def test_fp16_whose_first_steps_are_skipped_is_the_same_on_any_devices(tmp_path):
    for reducer, num_devices in (("single", 1), ("ddp", 2)):
        train(configured(reducer, num_devices, "fp16"), tmp_path / reducer)
    assert written(tmp_path / "single") == written(tmp_path / "ddp")


def test_nothing_is_written_unless_asked_for(tmp_path):
    train(configured(every=None), tmp_path)
    of_lines, of_checkpoints = written(tmp_path)
    assert of_lines == {}
    assert set(map(str, of_checkpoints.values())) == {"{}"}
    assert (
        "digests"
        not in json.loads((RunDir(tmp_path).checkpoints / "step-000007/manifest.json").read_text())[
            "manifest"
        ]
    )


def flip(world: Any, config: RunConfig, num_flips: int) -> list[tuple[str, str]]:
    """Flip a random bit on a random rank, as often; return where it was, and what was said."""
    set_determinism("exact", threads=1)
    engine = build_engine(config, world)
    for _ in zip(range(3), engine.steps(), strict=False):
        pass
    state, chosen, found = engine.run.state, random.Random(config.distributed.num_devices), []
    names = list(gather_digests(state.take(), world, 3))
    tensors = dict(zip(names, tensors_in(state.take()), strict=True))
    tensors["lanewise_buffers/model/table"] = engine.training.model.table  # equal to a new one until then
    for _ in range(num_flips):
        name, rank = chosen.choice(sorted(tensors)), chosen.randrange(world.world_size)
        bit = chosen.randrange(8 * tensors[name].nbytes)
        change = tensors[name].detach().as_strided((tensors[name].numel(),), (1,)).view(torch.uint8)
        if rank == world.rank:
            change[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WorldError) as raised:
            gather_digests(state.take(), world, 3)
        found.append((f"{name} rank {rank}", str(raised.value)))
        if rank == world.rank:
            change[bit // 8] ^= 1 << bit % 8
    gather_digests(state.take(), world, 3)  # all is as it was
    return found


@pytest.mark.parametrize(
    ("num_processes", "num_flips", "optimizer"),
    [
        (3, 12, "torch.optim.AdamW"),
        *slow(*((num, 200, "torch.optim.AdamW") for num in (2, 3, 4)), (3, 50, "torch.optim.Adafactor")),
    ],
)
def test_a_flipped_bit_is_found_with_its_tensor_and_its_rank(num_processes, num_flips, optimizer):
    config = configured("ddp", num_processes, optimizer=optimizer)
    for seen in run_distributed(flip, num_processes, config, num_flips):
        assert len(seen) == num_flips
        for where, said in seen:
            name, _, rank = where.partition(" rank ")
            # A tensor that is tied to another one is named by the first of their names.
            tied = {name, name.replace("head.weight", "embedding.weight")}
            assert said.partition(" differs between processes after step 3")[0] in tied
            ranks = re.findall(r"rank (\d) \(", said)
            assert ranks == ([rank] if num_processes > 2 else ["0", "1"])


def flip_shards(world: Any, config: RunConfig, num_flips: int) -> list[tuple[str, set[str]]]:
    """Flip a random bit of a random shard, as often; return in which tensor, and whose digests changed."""
    set_determinism("exact", threads=1)
    engine = build_engine(config, world)
    for _ in zip(range(3), engine.steps(), strict=False):
        pass
    state, chosen, found = engine.run.state, random.Random(1), []
    digests = gather_digests(state.take(), world, 3)
    tensors = dict(zip(digests, tensors_in(state.take()), strict=True))
    sharded = sorted(name for name, tensor in tensors.items() if is_sharded(tensor))
    for _ in range(num_flips):
        name = chosen.choice(sharded)
        sizes = world.all_gather_tree(tensors[name].to_local().nbytes)
        rank = chosen.choice([rank for rank, size in enumerate(sizes) if size])
        bit = chosen.randrange(8 * sizes[rank])
        local = tensors[name].to_local().detach()
        change = local.as_strided((local.numel(),), (1,)).view(torch.uint8)
        if rank == world.rank:
            change[bit // 8] ^= 1 << bit % 8
        flipped = gather_digests(state.take(), world, 3)
        found.append((name, {other for other in digests if flipped[other] != digests[other]}))
        if rank == world.rank:
            change[bit // 8] ^= 1 << bit % 8
    assert gather_digests(state.take(), world, 3) == digests
    whole = dict(engine.training.model.named_buffers())["norm.running_mean"]
    if world.rank == 1:
        whole.neg_()
    with pytest.raises(WorldError, match=r"model/norm\.running_mean differs between processes after step 3"):
        gather_digests(state.take(), world, 3)
    return found


@pytest.mark.parametrize(("num_processes", "num_flips"), [(2, 12), *slow((3, 100))])
def test_of_a_shard_a_flipped_bit_is_another_digest_and_no_error(num_processes, num_flips):
    """It exists once, so there is nothing to compare it with but another run. What is whole is compared."""
    for seen in run_distributed(flip_shards, num_processes, configured("fsdp", num_processes), num_flips):
        assert len(seen) == num_flips
        for name, changed in seen:
            # Tensors that are tied have two names.
            assert changed in ({name}, *({name, name.replace(*tied)} for tied in TIED))


_kept: list[object] = []
"""A model in DDP that goes right after a collective may wait for ever: see tests/script.py."""


class Flips(JsonlLogger):
    """Flips a bit of rank 0's weights when a step is logged, after its digests."""

    model: nn.Module

    def on_step(self, epoch, step, metrics):
        super().on_step(epoch, step, metrics)
        if step == 4:
            with torch.no_grad():
                self.model.sometimes.neg_()


def fit_flipped(world: Any, config: RunConfig, folder: str) -> str:
    set_determinism("exact", threads=1)
    run_dir = RunDir(Path(folder))
    run = build_run(config, world)
    logger = Flips(run_dir.metrics)
    logger.model = run.training.model
    saving = Saving(run, CheckpointFolder(run_dir.checkpoints))
    with pytest.raises(WorldError) as raised:
        Engine(run, saving=saving).fit(run_dir, [logger])
    saving.finish()  # of the checkpoint before it
    world.all_gather_tree(None)  # rank 0 keeps the store from which the others hear how the save ended
    _kept.append((run, raised))
    return str(raised.value)


def test_what_differs_is_not_saved(tmp_path):
    """The weights change after step 4 was taken, before its checkpoint."""
    messages = run_distributed(fit_flipped, 3, configured("ddp", 3), str(tmp_path))
    assert len(set(messages)) == 1
    assert messages[0].startswith("model/sometimes differs between processes after step 4, ")
    assert re.findall(r"rank (\d) \(", messages[0]) == ["0"]
    assert list(written(tmp_path)[1]) == [2]


def damage(checkpoint: Path) -> None:
    """Flip a bit of a tensor, and write the checksums of the files anew, as if it had been saved so."""
    manifest = Manifest.read(checkpoint)
    part = next(entry for entry in manifest.files if entry.num_bytes and entry.name.startswith("part-"))
    content = bytearray((checkpoint / part.name).read_bytes())
    content[-1] ^= 64
    entry = write_durably(checkpoint / part.name, bytes(content))
    files = tuple(entry if file == part else file for file in manifest.files)
    dataclasses.replace(manifest, files=files).write(checkpoint)
    Manifest.read(checkpoint).verify(checkpoint)


@pytest.mark.parametrize(
    ("saved", "reducer", "num_devices"),
    [
        ("fsdp", "ddp", 1),
        *slow(("ddp", "ddp", 1), ("ddp", "ddp", 2), ("ddp", "fsdp", 3), ("fsdp", "fsdp", 2)),
    ],
)
def test_a_checkpoint_that_was_wrong_when_it_was_written_is_refused(tmp_path, saved, reducer, num_devices):
    train(configured(saved, 2), tmp_path, last_step=4)
    (newest, *_) = CheckpointFolder(RunDir(tmp_path).checkpoints).all()
    damage(newest)
    with pytest.raises(RuntimeError, match=rf"{newest.name} is damaged: \S+/\S+ has the digest \w+, and had"):
        train(configured(reducer, num_devices, every=None), tmp_path)  # whether or not this start writes any
