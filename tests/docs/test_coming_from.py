"""The programs of docs/coming_from: ours are the same on one and on two processes, and theirs run."""

import ast
import bisect
import functools
import glob
import importlib.util
import itertools
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lanewise.testing import run_distributed
from tests.integration.command import BIN, TORCHRUN, run, train
from tests.script import run_script
from tests.slow import slow

PAGES = Path(__file__).parents[2] / "docs" / "coming_from"
CODE = PAGES / "code"

# spawn_ours.py starts processes by itself: test_articles.py runs it.
OUR_LOOPS = sorted(
    path
    for path in CODE.glob("*_ours.py")
    if "lanewise.Lanes(" in path.read_text() and path.stem != "spawn_ours"
)
# allennlp_qa_ours.jsonnet needs data and a pretrained model; tests/integration trains it on small ones.
# nanogpt_ours.yaml needs files that its page makes: test_articles.py trains it.
OUR_CONFIGS = sorted(
    path
    for path in CODE.glob("*_ours.*")
    if path.suffix != ".py" and path.stem not in ("allennlp_qa_ours", "nanogpt_ours")
)
THEIR_SCRIPTS = sorted(CODE.glob("*_theirs.py"))
OF_ARTICLES = ("nanogpt_theirs", "spawn_theirs")
"""Those that test_articles.py runs, with what they need."""

# What a script needs besides torch. Where it is missing, the script is only parsed. apex.amp was removed from
# apex, and allennlp needs an older torch.
THEIR_LIBRARIES = {
    "accelerate_theirs": ("accelerate",),
    "allennlp_theirs": ("allennlp",),
    "apex_theirs": ("apex.amp",),
    "hf_trainer_theirs": ("transformers", "accelerate"),
    "lightning_theirs": ("lightning",),
    "transformers4rec_theirs": ("transformers4rec",),
}


def stem(path: Path) -> str:
    return path.name


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def run_loop(script: Path, folder: Path, num_processes: int) -> bytes:
    """Run a script in a new folder, and return the weights that it leaves there."""
    folder.mkdir()
    run_script(script, cwd=folder, num_processes=num_processes)
    return (folder / "model.safetensors").read_bytes()


def run_config(config: Path, run_dir: Path, devices: int) -> bytes:
    train(config, f"--distributed.devices={devices}", f"--train.run_dir={run_dir}").require_success()
    return (run_dir / "model.safetensors").read_bytes()


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep the sessions that an example generates out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the weights that one of our programs leaves on one process; each runs once."""

    @cache
    def run_alone(program: Path) -> bytes:
        folder = tmp_path_factory.mktemp("alone") / "run"
        if program in OUR_LOOPS:
            return run_loop(program, folder, 1)
        return run_config(program, folder, devices=1)

    return run_alone


@pytest.mark.parametrize("script", OUR_LOOPS, ids=stem)
def test_our_loop_leaves_the_same_weights_on_one_and_on_two_processes(tmp_path, alone, script):
    assert run_loop(script, tmp_path / "two", 2) == alone(script)


@pytest.mark.slow
def test_torchrun_starts_our_loop_too(tmp_path, alone):
    script = CODE / "data_parallel_ours.py"
    run(*TORCHRUN, 2, script, cwd=tmp_path).require_success()
    assert (tmp_path / "model.safetensors").read_bytes() == alone(script)


@pytest.mark.parametrize(
    "config", [one if "lightning" in one.name else slow(one)[0] for one in OUR_CONFIGS], ids=stem
)
def test_our_config_leaves_the_same_weights_on_one_and_on_two_processes(tmp_path, alone, config):
    assert run_config(config, tmp_path / "two", devices=2) == alone(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run_dir", "library"),
    [("hf_trainer_ours", "output", "accelerate"), ("lightning_module_ours", "runs/points", "lightning")],
)
def test_an_object_of_their_library_leaves_the_same_weights_on_one_and_on_two_processes(
    tmp_path, name, run_dir, library
):
    if not is_installed(library):
        pytest.skip(f"not installed: {library}")
    found = []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        shutil.copytree(CODE, folder)
        script = folder / f"{name}.py"
        script.write_text(script.read_text().replace('"devices": 2', f'"devices": {devices}'))
        run_script(script, cwd=folder)
        found.append((folder / run_dir / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    assert len(found[0]) > 1000


def test_training_from_python_leaves_the_same_weights_as_from_a_config(tmp_path, alone):
    assert "test/accuracy" in run_script(CODE / "lightning_ours.py", cwd=tmp_path)
    model = tmp_path / "runs" / "from-python" / "model.safetensors"
    assert model.read_bytes() == alone(CODE / "lightning_ours.yaml")


def test_pages_with_the_same_loop_leave_the_same_weights(alone):
    """What a page leaves out, evaluation for instance, changes nothing about what it keeps."""
    assert alone(CODE / "data_parallel_ours.py") == alone(CODE / "ddp_ours.py")


@pytest.mark.parametrize("script", THEIR_SCRIPTS, ids=stem)
def test_their_script_parses_and_does_not_know_lanewise(script):
    tree = compile(script.read_text(), script, "exec", ast.PyCF_ONLY_AST)
    assert not any("lanewise" in ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import))


@pytest.mark.parametrize(
    "script",
    [
        slow(path)[0] if path.stem in THEIR_LIBRARIES else path
        for path in THEIR_SCRIPTS
        if path.stem not in OF_ARTICLES
    ],
    ids=stem,
)
def test_their_script_runs_where_its_library_is_installed(tmp_path, script):
    for module in THEIR_LIBRARIES.get(script.stem, ()):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed: {script.name} was only parsed")
    if script.stem == "ddp_theirs":
        printed = run_script(script, cwd=tmp_path, num_processes=2)
        assert printed.count("over 58 samples") == 3  # one of the 57 is counted twice, as the page says
        assert (tmp_path / "model.pt").exists()
    elif script.stem in THEIR_LIBRARIES:  # which may start processes in a way of its own
        run(BIN / "python", script, cwd=tmp_path, variables={"PYTHONWARNINGS": None}).require_success()
    else:
        run_script(script, cwd=tmp_path)


def past_the_wrapper(world):
    """Return the gradient that a weight has after a pass by either way; each rank has another input."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    made = []
    for forward in (model.module, model):
        forward(torch.tensor([[float(world.rank)]])).sum().backward()
        made.append(model.module.weight.grad.item())
        model.zero_grad()
    return made


def test_gradients_made_past_the_wrapper_of_ddp_are_not_reduced():
    assert run_distributed(past_the_wrapper, 2) == [[0.0, 0.5], [1.0, 0.5]]


@pytest.mark.parametrize("name", ["allennlp_theirs", "allennlp_qa_theirs"])
def test_their_allennlp_configuration_is_jsonnet(name):
    jsonnet = pytest.importorskip("_jsonnet")
    jsonnet.evaluate_file(str(CODE / f"{name}.jsonnet"))


def test_the_counts_on_the_pages_are_those_of_the_data():
    toy = load_module(CODE / "toy.py")
    num_samples, num_test_samples = len(toy.train_data), len(toy.test_data)
    assert (num_samples, num_test_samples) == (203, 57)
    assert num_samples == 3 * 64 + 11
    assert num_samples == 12 * 16 + 11
    for samples, padded in ((num_samples, 204), (num_test_samples, 58)):
        sampler = torch.utils.data.DistributedSampler(range(samples), num_replicas=2, rank=0)
        assert 2 * len(sampler) == padded


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=stem)
def test_a_page_shows_its_programs_as_they_are(page):
    assert writer().write_programs(page) == page.read_text(), "python docs/write_programs.py writes them anew"


def test_each_program_is_on_a_page_and_each_page_has_both_sides():
    linked = set()
    for page in set(PAGES.glob("*.md")) - {PAGES / "README.md"}:
        text = page.read_text()
        programs = set(re.findall(r"\]\(code/([\w.]+)\)", text))
        assert any("_theirs." in name for name in programs), page
        assert writer().SHOWN.search(text), page
        assert len(text.split()) <= 600, page
        linked |= programs
    linked |= set(re.findall(r"code/([\w.]+)\)", (PAGES.parent / "own_loop.md").read_text()))
    assert {path.name for path in CODE.iterdir() if path.is_file()} <= linked | {"toy.py"}


def writer():
    return load_module(PAGES.parent / "write_programs.py")


def load_module(path: Path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_wrapper_of_a_base_reader_gives_the_samples_of_all_files(tmp_path):
    """Also in the processes of a loader, and where a file is empty."""
    page = (PAGES / "allennlp.md").read_text()
    (source,) = re.findall(r"```python\n(class Shards.*?)```", page, re.DOTALL)
    names = {"torch": torch, "bisect": bisect, "functools": functools, "glob": glob, "itertools": itertools}
    exec(source, names)
    for number, words in enumerate(("a b c", "", "d e")):
        (tmp_path / f"{number}.txt").write_text(words)
    dataset = names["Shards"](lambda path: Path(path).read_text().split(), f"{tmp_path}/*.txt")
    assert [dataset[index] for index in range(len(dataset))] == list("abcde")
    loader = torch.utils.data.DataLoader(dataset, num_workers=1, multiprocessing_context="fork")
    assert [one for (one,) in loader] == list("abcde")
