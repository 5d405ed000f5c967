"""The optimizer of a run: what is refused, and the weights that it gives the model to be evaluated."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lanewise.config import EvaluateConfig, OptimizerConfig, RunConfig
from lanewise.config.check import read_section
from lanewise.config.classes import check_classes
from lanewise.config.optimizer_rules import check_optimizer
from lanewise.data import digest
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_model, build_run, build_task
from lanewise.engine.run.optimizer import build_optimizer
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.run import Run
from lanewise.engine.run.saving import Saving
from lanewise.errors import CheckpointError, ConfigError, PreemptedError, TaskError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.device.nested import map_leaves
from lanewise.processes.world.shards import whole
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import Smooth, configure, train
from tests.slow import slow


def test_a_value_that_torch_refuses_names_the_section():
    section = OptimizerConfig(class_path="torch.optim.Adam", init_args={"lr": -1.0})
    config = dataclasses.replace(configure(Smooth), optimizer=section)
    task = build_task(config)
    said = r"optimizer: torch\.optim\.Adam refuses its arguments: Invalid learning rate: -1\.0\."
    with pytest.raises(ConfigError, match=said):
        build_optimizer(config, task, build_model(task, 0))


NO_DECAY = [[["bias", r"^0\."], {"weight_decay": 0.0}], [["3.weight", "weight"], {"lr": 1e-3}]]


def with_section(optimizer: str = "torch.optim.AdamW", task: type[Smooth] = Smooth, **keys: Any) -> RunConfig:
    section = read_section(OptimizerConfig, {"class_path": optimizer, "init_args": {"lr": 1e-2}, **keys})
    return dataclasses.replace(configure(task), optimizer=section)


def built(config: RunConfig) -> torch.optim.Optimizer:
    task = build_task(config)
    return build_optimizer(config, task, build_model(task, 0))


def test_a_parameter_is_in_the_first_group_of_which_a_pattern_is_in_its_name():
    optimizer = built(with_section(parameter_groups=NO_DECAY[:1]))
    shown = [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
    assert shown == [(["0.weight", "1.bias", "3.bias"], 0.0), (["1.weight", "3.weight"], 0.01)]
    first, second = built(with_section(parameter_groups=NO_DECAY)).param_groups  # no rest, no third group
    assert (first["lr"], second["lr"], second["param_names"]) == (1e-2, 1e-3, ["1.weight", "3.weight"])


class Grouped(Smooth):
    """The same by a method."""

    def parameter_groups(self, model):
        named = dict(model.named_parameters())
        own = [(name, named.pop(name)) for name in ("0.weight", "1.bias", "3.bias")]
        return [{"params": own, "weight_decay": 0.0}, {"params": [*named.items()], "lr": 1e-3}]


def train_each(world: World, configs: list[RunConfig]) -> list[Any]:
    return [train(world, config) for config in configs]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_groups_of_the_configuration_train_as_those_of_the_task(num_processes):
    configs = [with_section(parameter_groups=NO_DECAY), with_section(task=Grouped), with_section()]
    for by_section, by_method, without in run_distributed(train_each, num_processes, configs):
        assert by_section == by_method != without


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[["bais"], {}]], "parameter_groups.0: bais is found in no name .* Did you mean bias?"),
        (
            [[["bias"], {}], [["1.bias"], {}]],
            "parameter_groups.1: all parameters that it names are in groups",
        ),
        ([[["bias"], {"weight_decy": 0}]], "0: AdamW has no option weight_decy. Did you mean weight_decay?"),
        ([[["bias"], {"params": []}]], "0: AdamW has no option params"),
        ([[["bias("], {}]], r"parameter_groups.0.patterns.0 must be a regular expression: got \"bias\(\""),
        ([["bias", {}]], r"parameter_groups.0.patterns must be a list.* Write \[bias\]"),
        ([[["bias"]]], "parameter_groups.0 must be a section with the keys patterns, options"),
    ],
)
def test_a_wrong_group_is_an_error_that_says_what_is_meant(groups, expected):
    with pytest.raises(ConfigError, match=expected):
        built(with_section(parameter_groups=groups))


def test_groups_of_the_task_and_of_the_configuration_exclude_each_other():
    with pytest.raises(ConfigError, match=r"Grouped\.parameter_groups both make groups"):
        built(with_section(task=Grouped, parameter_groups=NO_DECAY))


def make_optimizer(parameters: Any, lr: float, kind: str = "AdamW") -> Any:
    return {"AdamW": torch.optim.AdamW, "LBFGS": torch.optim.LBFGS, "none": list}[kind](
        parameters, **({} if kind == "none" else {"lr": lr})
    )


def test_a_function_makes_an_optimizer_over_the_groups():
    by_function = f"{__name__}.{make_optimizer.__name__}"
    configs = [with_section(by_function, parameter_groups=NO_DECAY), with_section(parameter_groups=NO_DECAY)]
    for config in configs:
        check_classes(config)
        check_optimizer(config, ["cpu"])
    function, cls = run_distributed(train_each, 1, configs)[0]
    assert function == cls
    assert type(built(configs[0])) is torch.optim.AdamW


def test_what_a_function_makes_is_checked():
    def of(kind: str) -> RunConfig:
        config = with_section(f"{__name__}.{make_optimizer.__name__}", init_args={"lr": 0.1, "kind": kind})
        return dataclasses.replace(config, precision="fp16")

    with pytest.raises(ConfigError, match=r"made a list. Name a function that returns a torch.optim.Optim"):
        built(of("none"))
    with pytest.raises(ConfigError, match="asks for the gradient several times in a step"):
        built(of("LBFGS"))


def test_a_run_goes_on_with_its_groups_and_with_others_if_allowed(tmp_path):
    def run(section: RunConfig, allow: tuple[str, ...] = ()) -> Run:
        run = build_run(section, LocalWorld(torch.device("cpu")))
        checkpoints = CheckpointFolder(tmp_path)
        if resume_run(run, checkpoints, allow) == 0:
            saving = Saving(run, checkpoints)
            Engine(run, saving=saving)
            saving.save(0, None, stops=False)
            saving.finish()
        return run

    run(with_section(parameter_groups=NO_DECAY))
    assert run(with_section(parameter_groups=NO_DECAY)).training.optimizer.param_groups[1]["lr"] == 1e-3
    changed = [NO_DECAY[0], [["weight"], {"lr": 2e-3}]]
    with pytest.raises(CheckpointError, match=r"optimizer was .*parameter_groups"):
        run(with_section(parameter_groups=changed))
    allowed = run(with_section(parameter_groups=changed), ("optimizer",))
    assert allowed.training.optimizer.param_groups[1]["lr"] == 2e-3
    with pytest.raises(CheckpointError, match="optimizer"):  # other parameters in them
        run(with_section(parameter_groups=[[["bias"], {}]]), ("optimizer",))


class Outside(Smooth):
    """Trains a temperature that is no part of its model."""

    def parameter_groups(self, model):
        return [*model.parameters(), nn.Parameter(torch.ones(3))]


def test_a_parameter_outside_of_the_model_is_an_error():
    """Each process trained its own, and the first checkpoint could not be saved."""
    config = configure(Outside)
    task = build_task(config)
    with pytest.raises(TaskError, match=r"of shape \(3,\), is not in the model"):
        build_optimizer(config, task, build_model(task, 0))


class Evaluated(Smooth):
    """In float32, where a way back from the evaluated weights rounds, and with an eval dataset."""

    def build_model(self) -> nn.Module:
        return super().build_model().float()

    def eval_datasets(self) -> Mapping[str, Any]:
        return {"held_out": self.train_dataset()}


def configured(optimizer: str, *, every_steps: int = 1, **distributed: Any) -> RunConfig:
    config = configure(Evaluated, num_lanes=4, steps=4, optimizer="torch.optim.SGD")
    init_args = {"lr": 3.0 if optimizer == "ScheduleFree" else 0.1}  # so that its way back rounds
    section = OptimizerConfig(class_path=f"tests.distributed.optimizers.{optimizer}", init_args=init_args)
    return dataclasses.replace(
        config,
        optimizer=section,
        evaluate=EvaluateConfig(every_steps=every_steps, best="held_out/loss"),
        distributed=dataclasses.replace(config.distributed, **distributed),
    )


def state_of(run: Run) -> str:
    """Return a digest of what a checkpoint would hold. Collective."""
    state = run.state.take()
    state.pop("best")
    return digest(map_leaves(lambda leaf: whole(getattr(leaf, "tensor", leaf)), state))


def fit(world: World, config: RunConfig, folder: Path) -> tuple[str, dict[str, float], dict[str, bytes]]:
    """Train; return a digest of the training state, the last evaluation, and the models that were written."""
    set_determinism("exact", threads=1)
    engine = build_engine(config, world)
    values = engine.fit(RunDir(folder))
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    return state_of(engine.run), values, files


def fit_alone(config: RunConfig, folder: Path) -> Any:
    return fit(LocalWorld(torch.device("cpu")), config, folder)


def folder_in(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


MODES = ["ScheduleFree", "Swapping"]


@pytest.mark.parametrize("optimizer", MODES)
def test_an_evaluation_by_other_weights_leaves_the_bytes_of_the_training(tmp_path, optimizer):
    """The way back is a lerp, which rounds: when a run was evaluated and saved, it trained another model."""
    once = fit_alone(configured(optimizer, every_steps=100), folder_in(tmp_path, "once"))
    often = fit_alone(configured(optimizer), folder_in(tmp_path, "often"))
    assert often[0] == once[0]
    assert often[1] == once[1]
    assert often[2]["model.safetensors"] == once[2]["model.safetensors"]


@pytest.mark.parametrize("optimizer", ["ScheduleFree", *slow("Swapping")])
def test_what_is_evaluated_and_written_are_the_evaluation_weights(tmp_path, optimizer):
    engine = build_engine(configured(optimizer), LocalWorld(torch.device("cpu")))
    values = engine.fit(RunDir(tmp_path))
    training = engine.training
    trained = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.optimizer.eval()
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == trained.keys()
    for name, value in training.model.state_dict().items():
        assert torch.equal(written[name], value)
        assert not torch.equal(written[name], trained[name])
    assert engine.evaluation.best[1] == values["held_out/loss"]  # it falls, so the last one is the best
    best = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(best[name], value) for name, value in written.items())


def test_a_stopped_evaluation_leaves_the_bytes_of_the_training():
    world = LocalWorld(torch.device("cpu"))
    engine = build_engine(configured("ScheduleFree"), world)
    for number, _ in enumerate(engine.steps()):
        before = state_of(engine.run)
        with pytest.raises(PreemptedError), engine.run.evaluation_weights():
            engine.evaluation.run(lambda: True)
        assert state_of(engine.run) == before, number


LAYOUTS = [
    (3, {"shard_optimizer": True}),
    *slow((2, {}), (2, {"shard_optimizer": True}), (2, {"reducer": "fsdp"}), (3, {"reducer": "fsdp"})),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_evaluation_weights_are_the_same_on_any_number_of_processes(tmp_path, world_size, layout):
    alone = fit_alone(configured("ScheduleFree"), folder_in(tmp_path, "alone"))
    config = configured("ScheduleFree", **layout)
    (_, values, files), *_ = run_distributed(fit, world_size, config, folder_in(tmp_path, "shared"))
    assert values == alone[1]
    assert files == alone[2]


@pytest.mark.parametrize("optimizer", [*slow("ScheduleFree"), "Swapping"])
def test_a_run_with_modes_resumes_to_the_same_bytes(tmp_path, optimizer):
    config = configured(optimizer)
    whole_run = fit_alone(config, folder_in(tmp_path, "whole"))
    world, half = LocalWorld(torch.device("cpu")), folder_in(tmp_path, "half")
    run = dataclasses.replace(build_run(config, world), last_step=2)
    checkpoints = CheckpointFolder(half / "checkpoints")
    Engine(run, saving=Saving(run, checkpoints)).fit(RunDir(half))
    resumed = build_run(config, world)
    first_step = resume_run(resumed, checkpoints, allow=())
    assert first_step == 2
    Engine(resumed, first_step=first_step).fit(RunDir(half))
    assert state_of(resumed) == whole_run[0]
    assert (half / "model.safetensors").read_bytes() == whole_run[2]["model.safetensors"]


def take_a_step(world: World, config: RunConfig) -> str:
    torch.optim.SGD([torch.zeros(1)])  # now torch calls hooks for its step too, which a derived class calls
    try:
        next(iter(build_engine(config, world).steps()))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("Noisy", {"shard_optimizer": True}),
        ("NoisyByItself", {"reducer": "fsdp"}),
        *slow(("Noisy", {"reducer": "fsdp"}), ("NoisyByItself", {"shard_optimizer": True})),
    ],
)
def test_an_optimizer_that_draws_is_refused_where_each_process_updates_a_part(optimizer, layout):
    """It drew other numbers for each parameter, and trained another model without a word."""
    for said in run_distributed(take_a_step, 2, configured(optimizer, **layout)):
        assert f"optimizer.class_path: {optimizer} draws random numbers, and each process would" in said
    assert run_distributed(take_a_step, 2, configured(optimizer)) == ["", ""]


def test_an_optimizer_that_fails_on_shards_is_one_error():
    """Rprop and Adafactor ended with an error of torch about an operator."""
    config = configured("ScheduleFree", reducer="fsdp")
    section = OptimizerConfig(class_path="torch.optim.Rprop", init_args={"lr": 0.1})
    for said in run_distributed(take_a_step, 2, dataclasses.replace(config, optimizer=section)):
        assert said.startswith("optimizer.class_path: Rprop cannot update parameters that are sharded by ")
        assert said.endswith("shard_optimizer=true shares out whole parameters.")
