"""Files and overrides become a RunConfig, with every mistake of both at once and without torch."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.config import (
    BatchConfig,
    ClassConfig,
    DataConfig,
    DistributedConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
)
from lanewise.config.load import Override, apply_overrides, dump_config, load_config
from lanewise.errors import ConfigError
from tests.soak.mutate_configurations import load as load_mutation
from tests.soak.mutate_configurations import mutate

YAML = """\
task: {class_path: my_project.Mnist, init_args: {width: 32}}
batch: {global_batch_size: 256, micro_batch_size: 32}
train: {epochs: 3, run_dir: runs/mnist}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}
"""
TREE = {
    "task": {"class_path": "my_project.Mnist", "init_args": {"width": 32}},
    "batch": {"global_batch_size": 256, "micro_batch_size": 32},
    "train": {"epochs": 3, "run_dir": "runs/mnist"},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
}
TOML = """\
[task]
class_path = "my_project.Mnist"
init_args.width = 32
[batch]
global_batch_size = 256
micro_batch_size = 32
[train]
epochs = 3
run_dir = "runs/mnist"
[optimizer]
class_path = "torch.optim.AdamW"
init_args = {lr = 1e-3}
"""
JSONNET = """\
local lanes = 8;
{
  task: {class_path: 'my_project.Mnist', init_args: {width: 32}},
  batch: {micro_batch_size: 32, global_batch_size: lanes * self.micro_batch_size},
  train: {epochs: 3, run_dir: 'runs/mnist'},
  optimizer: {class_path: 'torch.optim.AdamW', init_args: {lr: 1e-3}},
}
"""


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return str(path)


def mistakes_of(path: Path | str, *overrides: Override) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), overrides)
    assert all("\n" not in mistake for mistake in caught.value.mistakes)
    return caught.value.mistakes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", YAML),
        ("run.yml", YAML),
        ("run.json", json.dumps(TREE)),
        ("run.json", "\ufeff" + json.dumps(TREE)),
        ("run.toml", TOML),
        ("run.jsonnet", JSONNET),
    ],
)
def test_every_format_gives_the_same_configuration(tmp_path, name, text):
    if name.endswith(".jsonnet"):
        pytest.importorskip("_jsonnet")
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert load_config(str(path)) == RunConfig(
        task=ClassConfig(class_path="my_project.Mnist", init_args={"width": 32}),
        batch=BatchConfig(global_batch_size=256, micro_batch_size=32),
        train=TrainConfig(run_dir="runs/mnist", epochs=3),
        optimizer=OptimizerConfig(class_path="torch.optim.AdamW", init_args={"lr": 0.001}),
        search_path=str(tmp_path),
    )


def test_jsonnet_imports_files_beside_the_configuration(tmp_path):
    pytest.importorskip("_jsonnet")
    (tmp_path / "base.json").write_text(json.dumps(TREE))
    (tmp_path / "run.jsonnet").write_text("(import 'base.json') + {train+: {epochs: 7}}")
    assert load_config(str(tmp_path / "run.jsonnet")).train.epochs == 7


def test_a_missing_jsonnet_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "_jsonnet", None)
    (tmp_path / "run.jsonnet").write_text(JSONNET)
    (mistake,) = mistakes_of(tmp_path / "run.jsonnet")
    assert mistake.endswith("Run: pip install lanewise[jsonnet]")


@pytest.mark.parametrize("text", ["{", "error 'no'", "local x = 1; x + "])
def test_broken_jsonnet(tmp_path, text):
    pytest.importorskip("_jsonnet")
    (tmp_path / "run.jsonnet").write_text(text)
    (mistake,) = mistakes_of(tmp_path / "run.jsonnet")
    assert "is not valid Jsonnet: " in mistake
    assert "run.jsonnet:1" in mistake


def test_a_configuration_of_allennlp_is_one_error_that_names_its_page():
    """Each of its keys was one."""
    path = Path(__file__).parents[3] / "docs" / "coming_from" / "code" / "allennlp_theirs.jsonnet"
    pytest.importorskip("_jsonnet")
    (mistake,) = mistakes_of(path)
    assert "is a configuration of AllenNLP. Write one as docs/coming_from/allennlp.md shows" in mistake


def test_a_missing_file_suggests_its_neighbour(yaml_file):
    path = Path(yaml_file).with_name("rnu.yaml")
    assert mistakes_of(path) == (f"the configuration file {path} does not exist. Did you mean run.yaml?",)


def test_a_missing_file_in_an_empty_folder(tmp_path):
    (mistake,) = mistakes_of(tmp_path / "run.yaml")
    assert mistake.endswith(f"does not exist. Looked in {tmp_path}.")


def test_a_folder_cannot_be_read(tmp_path):
    (tmp_path / "run.yaml").mkdir()
    (mistake,) = mistakes_of(tmp_path / "run.yaml")
    assert "run.yaml is a folder. Name the configuration in it" in mistake


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"task: \xff\xfe")
    (mistake,) = mistakes_of(tmp_path / "run.yaml")
    assert "cannot be read" in mistake


def test_an_unknown_ending(tmp_path):
    (mistake,) = mistakes_of(tmp_path / "run.ini")
    assert "need one of .yaml, .yml, .json, .toml, .jsonnet" in mistake


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("run.json", '{"a": 1,\n "b": }', "line 2, column 7 is not valid JSON"),
        ("run.json", '{"a": 1, "b": {"c": 1, "c": 2}}', "has the key c twice"),
        ("run.toml", "a = 1\nb = = 2\n", "is not valid TOML: Invalid value (at line 2"),
        ("run.yaml", "a: 1\n- b\n", "run.yaml, line 2, column 1 is not valid YAML"),
        ("run.yaml", "", "must hold a mapping of keys to values: got null"),
        ("run.yaml", "- task\n", 'must hold a mapping of keys to values: got ["task"]'),
        ("run.json", "3", "must hold a mapping of keys to values: got 3"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path, name, text, part):
    (tmp_path / name).write_text(text)
    (mistake,) = mistakes_of(tmp_path / name)
    assert part in mistake


def test_overrides_are_applied_in_their_order(yaml_file):
    config = load_config(
        yaml_file,
        [
            Override("batch.global_batch_size", "64"),
            Override("train.epochs", "null"),
            Override("train.max_steps", "7"),
            Override("scheduler.class_path", "my_project.Warmup"),
            Override("scheduler.init_args", "{steps: 5, note: a=b}"),
            Override("train.seed", "1"),
            Override("train.seed", "2"),
        ],
    )
    assert config.batch.num_lanes == 2
    assert config.train == TrainConfig(run_dir="runs/mnist", max_steps=7, seed=2)
    assert config.scheduler == SchedulerConfig(
        class_path="my_project.Warmup", init_args={"steps": 5, "note": "a=b"}
    )


def test_overrides_are_read_as_yaml_in_every_format(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    overrides = [Override("optimizer.init_args.lr", "1e-2"), Override("task.init_args.name", "no")]
    config = load_config(str(tmp_path / "run.toml"), overrides)
    assert config.optimizer.init_args == {"lr": 0.01}
    assert config.task.init_args == {"width": 32, "name": "no"}


def test_an_override_changes_one_of_two_aliases(tmp_path):
    aliased = YAML.replace("{width: 32}", "&same {width: 32}").replace("{lr: 1e-3}", "*same")
    (tmp_path / "run.yaml").write_text(aliased)
    config = load_config(str(tmp_path / "run.yaml"), [Override("task.init_args.width", "64")])
    assert config.task.init_args == {"width": 64}
    assert config.optimizer.init_args == {"width": 32}


@pytest.mark.parametrize(
    ("key", "text", "mistake"),
    [
        ("train.seed", None, "--train.seed has no value. Write --train.seed VALUE, or --train.seed=VALUE."),
        ("train..seed", "3", "--train..seed has an empty part in its dotted key. Write --a.b.c 3."),
        (
            "train.epochs.x",
            "3",
            (
                "--train.epochs.x is below train.epochs, which is 3, not a section. "
                "Override train.epochs itself."
            ),
        ),
        ("trian.epochs", "3", "trian is not a key of the configuration. Did you mean train?"),
        ("train.epoch", "3", "train.epoch is not a key of train. Did you mean train.epochs?"),
    ],
)
def test_a_wrong_override(yaml_file, key, text, mistake):
    assert mistake in mistakes_of(yaml_file, Override(key, text))


def test_a_class_that_stands_alone_takes_overrides(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "task: a.A\nbatch: {global_batch_size: 2, micro_batch_size: 1}\n"
        "train: {epochs: 1, run_dir: run}\noptimizer: {class_path: o.O}\n"
    )
    config = load_config(str(path), [Override("task.init_args.x", "2")])
    assert (config.task.class_path, config.task.init_args) == ("a.A", {"x": 2})
    assert load_config(str(path), [Override("task.class_path", "b.B")]).task.class_path == "b.B"


def test_an_override_that_is_no_yaml(yaml_file):
    (mistake,) = mistakes_of(yaml_file, Override("task.init_args", "{a: 1 b: 2}"))
    assert mistake.startswith("the value of --task.init_args, line 1, column ")


def test_mistakes_of_overrides_file_and_rules_come_at_once(tmp_path):
    text = YAML.replace("32}\ntrain", "32, x: 1}\ntrain").replace("optimizer:", "optimiser:")
    (tmp_path / "run.yaml").write_text(text)
    mistakes = mistakes_of(
        tmp_path / "run.yaml",
        Override("train.seed", None),
        Override("batch.global_batch_size", "250"),
        Override("train.epochs", "null"),
        Override("data", "1"),
    )
    assert [mistake.split(" ")[0] for mistake in mistakes] == [
        "--train.seed",
        "optimiser",
        "batch.x",
        "batch.global_batch_size",
        "train.epochs",
        "optimizer",
        "data",
    ]


NAMES = st.text(alphabet="abc", min_size=1, max_size=2)
# Text of these is the same in JSON and in YAML; beyond it, JSON writes two escapes that YAML does not join.
TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(
    PLAIN, lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3)
)
CLASSES = st.builds(
    ClassConfig, class_path=st.text(), init_args=st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
)
WARMUPS = st.integers(0) | st.floats(0, 1, exclude_max=True)
SCHEDULERS = (
    st.builds(lambda section, warmup: SchedulerConfig(**vars(section), warmup=warmup), CLASSES, WARMUPS)
    | st.builds(SchedulerConfig, name=st.sampled_from(["linear", "cosine"]), warmup=WARMUPS)
    | st.builds(SchedulerConfig, name=st.just("wsd"), decay=st.none() | WARMUPS)
)
CONFIGS = st.builds(
    RunConfig,
    task=CLASSES,
    batch=st.builds(
        lambda micro, lanes: BatchConfig(global_batch_size=micro * lanes, micro_batch_size=micro),
        st.integers(1, 4096),
        st.integers(8, 64),
    ),
    train=st.builds(
        TrainConfig,
        run_dir=st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="~{}")),
        epochs=st.integers(1),
        max_steps=st.none() | st.integers(1),
        seed=st.integers(0, 2**63 - 1),
        max_grad_norm=st.none() | st.floats(0, exclude_min=True),
    ),
    optimizer=st.builds(
        lambda section, closure: OptimizerConfig(**vars(section), closure=closure), CLASSES, st.booleans()
    ),
    scheduler=st.none() | SCHEDULERS,
    data=st.builds(
        DataConfig, num_workers=st.integers(0), order=st.sampled_from([None, "sequential", "bucketed"])
    ),
    distributed=st.builds(DistributedConfig, devices=st.none() | st.integers(1, 8), threads=st.integers(1)),
    search_path=st.just("/somewhere/else"),
)


@given(CONFIGS)
def test_a_dumped_configuration_loads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(str(path)) == config


def test_a_loaded_configuration_keeps_its_search_path_in_the_run_dir(tmp_path, yaml_file):
    config = load_config(yaml_file)
    run_dir = tmp_path / "runs" / "mnist"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_config(config))
    assert load_config(str(run_dir / "config.yaml")) == config
    assert config.search_path == str(tmp_path)


def test_a_search_path_is_relative_to_the_file_and_a_typed_one_to_the_working_directory(
    tmp_path, yaml_file, monkeypatch
):
    monkeypatch.chdir("/")
    assert load_config(yaml_file, [Override("search_path", "src")]).search_path == "/src"
    assert load_config(yaml_file, [Override("search_path", "null")]).search_path == str(tmp_path)
    Path(yaml_file).write_text(Path(yaml_file).read_text() + "\nsearch_path: src\n")
    assert load_config(yaml_file).search_path == str(tmp_path / "src")
    assert mistakes_of(yaml_file, Override("search_path", "3"))[0].startswith(
        "search_path must be text: got 3."
    )


def test_stage_one_imports_neither_torch_nor_the_argument_parser(yaml_file):
    program = (
        "import sys; from lanewise.config.load import dump_config, load_config; "
        f"dump_config(load_config({yaml_file!r})); "
        "assert not {'torch', 'numpy', 'jsonargparse'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_own_loop_imports_no_parser():
    """They took a tenth of the time in which torch is imported, and torchmetrics more than all of torch."""
    program = (
        "import sys; from lanewise import Lanes, Task; "
        "assert not {'jsonargparse', 'yaml', 'tomllib', 'torchmetrics', 'tensorboard'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_keys_by_the_thousand_are_a_few_lines(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML + "".join(f"epoch{number}: 1\n" for number in range(2000)))
    mistakes = mistakes_of(path)
    assert len(mistakes) == 11
    assert mistakes[10] == "1,990 more keys do not belong to the configuration. Remove them."


def test_the_folder_of_the_user_is_written_as_a_tilde(tmp_path, yaml_file, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(
        "~/run.yaml", [Override("train.run_dir", "~/runs/a"), Override("search_path", "~/src")]
    )
    assert config.train.run_dir == f"{tmp_path}/runs/a"
    assert config.search_path == f"{tmp_path}/src"


@pytest.mark.parametrize("value", ["~nobody-has-this-name/x", '"a\\0b"', '"a\\n#SBATCH --nodes=9"', '"a\\r"'])
@pytest.mark.parametrize("key", ["train.run_dir", "search_path"])
def test_what_is_no_path(yaml_file, key, value):
    (mistake,) = mistakes_of(yaml_file, Override(key, value))
    assert mistake.startswith(f"{key} must be a path: got ")


@pytest.mark.parametrize(
    ("override", "mistake"),
    [
        (Override("a." * 5000 + "a", "1"), "parts. Write at most 64."),
        (
            Override(f"callbacks.{'9' * 5000}", "1"),
            "is not an item of callbacks, which has 1. Count them from 0.",
        ),
        (Override("train.run_dir", "\udcff"), "surrogates not allowed."),
        (
            Override("train.seed", "9" * 5000),
            "the value of --train.seed holds an integer of more than 100 digits. ",
        ),
    ],
)
def test_overrides_without_measure(yaml_file, override, mistake):
    (found,) = mistakes_of(yaml_file, Override("callbacks", "[{class_path: a.A}]"), override)
    assert mistake in found


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(seed=st.integers(0))
def test_a_damaged_configuration_loads_or_is_refused(tmp_path_factory, seed):
    pytest.importorskip("_jsonnet")
    folder = tmp_path_factory.getbasetemp()
    assert load_mutation(folder, mutate(Random(seed))) in ("loaded", "refused")


def test_an_item_of_a_list_is_overridden_by_its_number(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "task: {class_path: a.A}\nbatch: {global_batch_size: 2, micro_batch_size: 1}\n"
        "train: {epochs: 1, run_dir: run}\noptimizer: {class_path: o.O}\n"
        "callbacks: [{class_path: c.C}, {class_path: c.D, init_args: {x: 1}}]\n"
    )
    config = load_config(str(path), [Override("callbacks.1.init_args.x", "2")])
    assert [callback.init_args for callback in config.callbacks] == [{}, {"x": 2}]
    with pytest.raises(
        ConfigError, match=r"--callbacks.2 is not an item of callbacks, which has 2. Count them"
    ):
        load_config(str(path), [Override("callbacks.2.init_args.x", "2")])


NAMES = st.text(alphabet="abc", min_size=1, max_size=2)
PLAIN = st.none() | st.booleans() | st.integers() | st.text(alphabet="ab: -1#'")
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(NAMES, PLAIN, max_size=3)


@given(
    tree=st.recursive(PLAIN, lambda below: st.dictionaries(NAMES, below, max_size=3)).filter(
        lambda tree: isinstance(tree, dict)
    ),
    keys=st.lists(NAMES, min_size=1, max_size=4),
    value=VALUES,
)
def test_an_override_sets_its_key_and_leaves_all_others(tree, keys, value):
    before = json.dumps(tree)
    overridden, mistakes = apply_overrides(tree, [Override(".".join(keys), json.dumps(value))])
    assert json.dumps(tree) == before

    expected = json.loads(before)
    section = expected
    for key in keys[:-1]:
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            assert len(mistakes) == 1
            assert overridden == tree
            return
    section[keys[-1]] = value
    assert mistakes == []
    assert overridden == expected
