"""Which starts of a run lead to a step, and with what configuration each took its steps."""

import json
import math
from dataclasses import asdict, replace

import pytest

from lanewise.commands.replay.plan import plan_replay, read_written
from lanewise.config import OptimizerConfig
from lanewise.config.load import Override, dump_config
from lanewise.errors import CheckpointError, ConfigError
from lanewise.runs.dir import RunDir
from tests.distributed.tasks import Language, configure
from tests.unit.commands.verify import test_audit


def configured(lr, folder):
    config = configure(Language, lr=lr)
    return replace(
        config, train=replace(config.train, run_dir=str(folder), max_steps=100), search_path=str(folder)
    )


def write_starts(folder, *starts):
    """Each is its first step, its learning rate, and what it allowed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(configured(starts[-1][1], folder)))
    with (folder / "run.jsonl").open("w") as file:
        for number, (first_step, lr, allow) in enumerate(starts):
            start = {"event": "start", "run_id": "a", "id": str(number), "first_step": first_step}
            text = json.dumps(asdict(configured(lr, folder)))
            config = json.loads(text, parse_constant=lambda name: {"not_finite": name})
            start |= {"last_step": 100, "allow": allow, "config": config, "versions": {}, "sources": {}}
            file.write(json.dumps(start) + "\n")


def segments(folder, step):
    plan = plan_replay(folder, step, trust=True)
    return [
        (segment.config.optimizer.init_args["lr"], segment.allow, segment.last_step)
        for segment in plan.segments
    ]


def test_the_start_that_took_a_step_tells_its_configuration(tmp_path):
    """config.yaml is that of the last start."""
    write_starts(tmp_path / "run", (1, 0.1, []), (51, 0.01, ["optimizer"]))
    assert segments(tmp_path / "run", 50) == [(0.1, (), 50)]


def test_what_lies_between_the_checkpoint_and_the_step_has_the_configuration_of_its_starts(tmp_path):
    write_starts(
        tmp_path / "run",
        *((1, 0.1, []), (31, 0.1, []), (51, 0.5, ["optimizer"])),
        *((41, 0.01, ["optimizer"]), (61, 0.01, ["optimizer"])),
    )
    # The start from step 51 was lost, as a later one began before it.
    assert segments(tmp_path / "run", 70) == [
        (0.1, (), 40),
        (0.01, ("optimizer",), 60),
        (0.01, ("optimizer",), 70),
    ]


def test_infinity_is_read_back_as_a_number(tmp_path):
    write_starts(tmp_path / "run", (1, math.inf, []))
    assert segments(tmp_path / "run", 1) == [(math.inf, (), 1)]


def test_a_text_that_is_the_name_of_a_number_stays_text(tmp_path):
    """Also as a key: replacing it in the whole record made that no JSON."""
    write_starts(tmp_path / "run", (1, 0.1, []))
    record = tmp_path / "run" / "run.jsonl"
    start = json.loads(record.read_text())
    given = {"NaN": "Infinity", "-Infinity": ["NaN"]}
    start["config"]["task"]["init_args"]["given"] = given
    record.write_text(json.dumps(start) + "\n")
    assert plan_replay(tmp_path / "run", 1, trust=True).config.task.init_args["given"] == given


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sources", ["a"], "sources is"),
        ("config", "text", "config is"),
        ("last_step", "9", "last_step is"),
        ("versions", 3, "versions is"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, name, value, message):
    write_starts(tmp_path / "run", (1, 0.1, []))
    record = tmp_path / "run" / "run.jsonl"
    record.write_text(json.dumps({**json.loads(record.read_text()), name: value}) + "\n")
    with pytest.raises(CheckpointError, match=f"run.jsonl is damaged: of the start at step 1, {message}"):
        plan_replay(tmp_path / "run", 1)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (0, "step 0 is none: they count from 1"),
        (101, "has 100 steps: got step 101"),
    ],
)
def test_a_step_that_the_run_does_not_have_is_refused(tmp_path, step, message):
    write_starts(tmp_path / "run", (1, 0.1, []))
    with pytest.raises(CheckpointError, match=message):
        plan_replay(tmp_path / "run", step)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no run"):
        plan_replay(tmp_path, 1)


def test_a_mistake_in_an_override_is_told(tmp_path):
    write_starts(tmp_path / "run", (1, 0.1, []))
    with pytest.raises(ConfigError, match="devices"):
        plan_replay(tmp_path / "run", 1, [Override("distributed.devices", "none at all")])


def test_one_process_of_this_machine_replays_unless_it_is_said_otherwise(tmp_path):
    write_starts(tmp_path / "run", (1, 0.1, []))
    assert plan_replay(tmp_path / "run", 1).config.distributed.num_devices is None
    override = Override("distributed.devices", "2")
    assert plan_replay(tmp_path / "run", 1, [override]).config.distributed.num_devices == 2


def test_what_the_run_wrote_is_told_by_step(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text(
        '{"epoch": 1, "step": 1, "train/learning_rate": 0.1, "train/loss": 2.0}\n'
        '{"event": "digests", "epoch": 1, "step": 2, "digests": {"model/w": "00"}}\n'
        '{"epoch": 1, "step": 2, "time": 1.5, "held_out/loss": 0.5}\n'
        '{"event": "jump", "epoch": 1, "step": 2}\n'
        '{"event": "digests", "epoch": 1, "step": 2}\n'
        '{"epoch": 1, "step": 3, "train/learning_rate": 0.1}\n'
        '{"event": "digests", "epoch": 1, "step": 3, "digests": {"model/w": "00"}}\n'
        '{"epoch": 1, "step": 4, "train/learning_rate": 0.1}\n'
    )
    written = read_written(run_dir, 1, 2)
    of_step = {"digests": {"model/w": "00"}, "evaluation": {"held_out/loss": 0.5}}
    assert written == {
        1: {"metrics": {"train/learning_rate": 0.1, "train/loss": 2.0}},
        2: {**of_step, "jump line": {}, "digests line": {}},
        3: {"metrics": {"train/learning_rate": 0.1}},  # the next line has the largest loss of step 2, too
    }


def test_an_audit_tells_of_the_steps_of_which_it_has_all_lanes(tmp_path):
    """A run may have been killed in the others."""
    test_audit.write(tmp_path / "audit", 0, 3, 2, test_audit.at(1, 2, lambda _: []))
    written = read_written(RunDir(tmp_path), 0)
    assert {step: [*recording["inputs"]] for step, recording in written.items()} == {
        1: [0, 1, 2, 3],
        3: [0, 1, 2],
    }
    assert [len(indices) for indices in written[3]["samples"].values()] == [2, 2, 2]


def test_optimizers_are_read_back_whole(tmp_path):
    write_starts(tmp_path / "run", (1, 0.1, []))
    assert plan_replay(tmp_path / "run", 1).config.optimizer == OptimizerConfig(
        class_path="torch.optim.AdamW", init_args={"lr": 0.1}
    )
