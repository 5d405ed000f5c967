"""The rules for optimizers and schedulers that depend on more than one section."""

from dataclasses import replace

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lanewise.config import DistributedConfig, EvaluateConfig, OptimizerConfig, SchedulerConfig
from lanewise.config.optimizer_rules import check_optimizer, choose_implementation, follows_evaluation
from lanewise.errors import ConfigError
from tests.unit.config.test_run import run_config

PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
EXACT = DistributedConfig(equality="exact")


class Slower(ReduceLROnPlateau):
    """A user's own."""


def section(name: str, **init_args: object) -> OptimizerConfig:
    return OptimizerConfig(class_path=f"torch.optim.{name}", init_args=init_args)


def test_an_optimizer_that_no_update_could_be_made_with_is_refused_with_all_that_is_wrong():
    config = run_config(optimizer=section("Adam", differentiable=True, capturable=True))
    with pytest.raises(ConfigError) as caught:
        check_optimizer(config, ["cpu"])
    assert [mistake.split(" ")[0] for mistake in caught.value.mistakes] == [
        "optimizer.init_args.differentiable",
        "optimizer.init_args.capturable",
    ]


def test_capturable_is_for_accelerators():
    check_optimizer(run_config(optimizer=section("Adam", capturable=True)), ["cuda:0"])


def test_a_fused_optimizer_updates_shards_in_close_only():
    optimizer = section("SGD", lr=0.1, fused=True)
    exact = DistributedConfig(reducer="fsdp", equality="exact")
    with pytest.raises(ConfigError, match=r"fused cannot be exact with distributed\.reducer fsdp"):
        check_optimizer(run_config(optimizer=optimizer, distributed=exact), ["cpu"])
    check_optimizer(run_config(optimizer=optimizer, distributed=DistributedConfig(reducer="fsdp")), ["cpu"])
    check_optimizer(run_config(optimizer=optimizer, distributed=EXACT), ["cpu"])


@pytest.mark.parametrize(
    ("optimizer", "distributed", "device_type", "chosen"),
    [
        (section("AdamW"), EXACT, "cuda", {"foreach": True}),
        (section("AdamW", fused=True), EXACT, "cuda", {"fused": True}),
        (section("AdamW"), EXACT, "cpu", {}),
        (section("AdamW"), DistributedConfig(), "cuda", {"fused": True}),
        (section("AdamW", foreach=False), DistributedConfig(), "cuda", {"foreach": False}),
        (section("AdamW"), DistributedConfig(), "mps", {}),
        (section("AdamW"), DistributedConfig(), "cpu", {}),
        (section("NAdam"), DistributedConfig(), "cuda", {}),  # has no fused one
        (section("LBFGS"), EXACT, "cuda", {}),  # has one implementation
    ],
)
def test_the_grade_chooses_the_implementation_on_an_accelerator(optimizer, distributed, device_type, chosen):
    config = run_config(optimizer=optimizer, distributed=distributed)
    assert choose_implementation(config, {device_type}, are_floats=True).init_args == chosen


def test_fused_optimizers_are_for_real_parameters():
    config = run_config(optimizer=section("AdamW"))
    assert choose_implementation(config, {"cuda"}, are_floats=False).init_args == {}


@pytest.mark.parametrize(
    ("class_path", "follows"),
    [(PLATEAU, True), (f"{__name__}.Slower", True), ("torch.optim.lr_scheduler.StepLR", False)],
)
def test_which_schedulers_follow_an_evaluation(class_path, follows):
    assert follows_evaluation(SchedulerConfig(class_path=class_path)) == follows


def test_a_scheduler_that_follows_no_value_is_refused():
    with pytest.raises(ConfigError, match=r"follows the value of evaluate.best, which is unset\. Set it"):
        check_optimizer(run_config(scheduler=SchedulerConfig(class_path=PLATEAU)), ["cpu"])


@pytest.mark.parametrize("init_args", [{}, {"mode": "max"}])
def test_a_scheduler_that_follows_the_best_value_is_good(init_args):
    scheduler = SchedulerConfig(class_path=PLATEAU, init_args=init_args)
    evaluate = EvaluateConfig(best="held_out/accuracy")
    check_optimizer(run_config(scheduler=scheduler, evaluate=evaluate), ["cpu"])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"distributed": DistributedConfig(reducer="fsdp")}, "looks at the whole gradient, and .* fsdp"),
        (
            {"distributed": DistributedConfig(shard_optimizer=True)},
            "gradient, and .* Leave shard_optimizer out",
        ),
        ({"precision": "fp16"}, "none of which can be skipped where fp16 overflows. Use precision=bf16"),
    ],
)
def test_what_an_optimizer_with_a_closure_cannot_be_combined_with(sections, said):
    with pytest.raises(ConfigError, match=f"torch.optim.LBFGS .*{said}"):
        check_optimizer(run_config(optimizer=section("LBFGS"), **sections), ["cpu"])
    check_optimizer(run_config(optimizer=section("LBFGS")), ["cpu"])
    asked = replace(section("SGD"), closure=True)
    with pytest.raises(ConfigError, match=f"torch.optim.SGD .*{said}"):
        check_optimizer(run_config(optimizer=asked, **sections), ["cpu"])
