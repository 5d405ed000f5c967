"""Training from Python: a plain script, and a notebook."""

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import lanewise
from lanewise.errors import CheckpointError, ConfigError, LaunchError, TaskError
from tests.generators import unmoved_generators
from tests.integration import curve
from tests.integration.command import LANEWISE, ROOT, TORCHRUN, Cold, run, train, wait_for, write_config
from tests.integration.command import lanewise as command_line
from tests.integration.notebook import Notebook, quiet_kernel
from tests.script import run_script

SCRIPT = Path(curve.__file__)
SECTIONS = {
    "batch": {"global_batch_size": 16, "micro_batch_size": 4},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The run directory that the command line leaves on one process."""
    folder = tmp_path_factory.mktemp("command-line")
    train_section = {"epochs": 4, "run_dir": str(folder / "run")}
    path = write_config(folder, "curve.Curve", train=train_section, **SECTIONS)
    train(path, "--task.init_args.width", 6).require_success()
    return folder / "run"


@pytest.fixture(autouse=True)
def in_project(monkeypatch):
    """The working directory has the code of the runs, which need no trust then."""
    monkeypatch.chdir(Path(__file__).parent)


def model_of(run_dir: Path) -> bytes:
    return (run_dir / "model.safetensors").read_bytes()


def last_evaluation(run_dir: Path) -> dict[str, float]:
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in line.items() if name.startswith("held_out/")}


def python(*arguments: object, cwd: Path) -> str:
    """Run `python ARGUMENTS`, cold, and return what it prints."""
    return run(sys.executable, *arguments, cwd=cwd).require_success().stdout


@pytest.mark.parametrize(
    ("program", "devices"),
    [(run_script, 1), (run_script, 2), pytest.param(python, 2, marks=pytest.mark.slow)],
)
def test_a_plain_script_leaves_what_the_command_line_leaves(tmp_path, finished, program, devices):
    stdout = program(SCRIPT, tmp_path / "run", devices, cwd=tmp_path)
    assert model_of(tmp_path / "run") == model_of(finished)
    assert last_evaluation(tmp_path / "run") == last_evaluation(finished)
    error, _ = stdout.split()
    assert float(error) == last_evaluation(finished)["held_out/error"]


def test_what_a_script_leaves_can_be_trained_again_from_its_configuration(tmp_path, finished):
    run_script(SCRIPT, tmp_path / "run", 2, cwd=tmp_path)
    train(tmp_path / "run" / "config.yaml", "--train.run_dir", tmp_path / "again").require_success()
    assert model_of(tmp_path / "again") == model_of(finished)


@pytest.mark.slow
def test_a_script_joins_the_processes_of_torchrun(tmp_path, finished):
    pins = {"MKL_CBWR": "AUTO", "OMP_NUM_THREADS": "1"}
    done = run(*TORCHRUN, 2, SCRIPT, tmp_path / "run", 2, variables=pins).require_success()
    assert model_of(tmp_path / "run") == model_of(finished)
    assert len(done.stdout.split()) == 2  # of rank 0; the other one's is in its log


@pytest.mark.slow
def test_an_interrupted_script_leaves_no_process(tmp_path):
    with Cold(sys.executable, SCRIPT, tmp_path / "run", 2, 0.5) as command:
        wait_for((tmp_path / "run" / "metrics.jsonl").exists)
        command.interrupt()
        done = command.finish()
    assert "KeyboardInterrupt" in done.stderr
    assert done.leftover == []


@pytest.mark.parametrize("devices", [None, 3])
def test_evaluating_a_run_gives_the_values_of_its_last_evaluation(tmp_path, finished, devices):
    chosen = [] if devices is None else ["--distributed.devices", devices]
    exact, file = last_evaluation(finished), tmp_path / "values.json"
    done = command_line("evaluate", finished, "--json", file, *chosen).require_success()
    heading, *lines = done.stdout.splitlines()
    assert heading == f"{finished}/model.safetensors on samples: 15 of held_out"
    assert lines == [f"held_out/{key:<5}  {exact[f'held_out/{key}']:.6g}" for key in ("loss", "error")]
    assert json.loads(file.read_text())["values"] == exact


@pytest.mark.slow
def test_evaluating_does_not_import_the_compiler_that_only_an_optimizer_needs(finished):
    """It takes 1.3 s, as long as torch itself nearly."""
    program = "import sys; from lanewise.cli.main import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    modules = python("-c", program, "evaluate", finished, cwd=SCRIPT.parent).splitlines()[-1]
    assert "'torch.nn'" in modules
    assert "'torch._dynamo'" not in modules


@pytest.mark.slow
def test_evaluating_under_torchrun_shows_the_values_once(finished):
    done = run(*TORCHRUN, 2, "-m", "lanewise", "evaluate", finished / "model.safetensors").require_success()
    assert done.stdout == command_line("evaluate", finished).require_success().stdout


def test_a_run_is_loaded_with_its_weights_and_other_arguments(finished):
    with unmoved_generators():
        _, model = lanewise.load(finished)
    assert not model.training
    saved = load_file(finished / "model.safetensors")
    assert {name: one.tolist() for name, one in model.state_dict().items()} == {
        name: one.tolist() for name, one in saved.items()
    }
    with pytest.raises(CheckpointError, match="is no finished run"):
        lanewise.load(finished / "nowhere.safetensors")
    with pytest.raises(ConfigError, match="is not an argument of"):
        lanewise.load(finished, init_args={"nonsense": [1]})


def test_predictions_are_written_alike_on_any_number_of_devices(tmp_path, finished):
    """From the run, and from its weights elsewhere with a configuration, which gave a traceback."""
    written = tmp_path / "one.jsonl"
    done = command_line("predict", finished, "--output", written).require_success()
    assert done.stdout == f"{written}: 15 samples of held_out, by {finished / 'model.safetensors'}\n"
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert lines == [output.tolist() for output in lanewise.predict(finished)]
    moved = shutil.copy(finished / "model.safetensors", tmp_path / "moved.safetensors")
    tensors = tmp_path / "three.safetensors"
    given = (finished / "config.yaml", "--weights", moved, "--dataset", "held_out", "--output", tensors)
    command_line("predict", *given, "--distributed.devices", 3).require_success()
    assert load_file(tensors)["predictions"].tolist() == lines


@pytest.mark.slow
def test_predictions_are_written_alike_under_torchrun(tmp_path, finished):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    command_line("predict", finished, "--output", one).require_success()
    run(*TORCHRUN, 2, "-m", "lanewise", "predict", finished, "--output", two).require_success()
    assert two.read_text() == one.read_text()


def test_weights_from_elsewhere_are_evaluated_by_a_configuration(tmp_path, finished):
    moved = shutil.copy(finished / "model.safetensors", tmp_path / "moved.safetensors")
    config = finished / "config.yaml"
    assert lanewise.evaluate(config, weights=moved) == last_evaluation(finished)
    done = command_line("evaluate", config)
    assert done.code == 2
    assert "has no weights. Give some by --weights FILE" in done.errors[0]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_runs_no_code_that_lies_in_it(tmp_path, finished, devices):
    """Evaluated from inside of its folder, where Python would look first."""
    folder = shutil.copytree(finished, tmp_path / "run")
    for name in ("torch", "curve", "pickle"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the {name} of the run')")
    chosen = ["--distributed.devices", devices]
    named = "--search_path", SCRIPT.parent
    done = command_line("evaluate", ".", *chosen, *named, cwd=folder).require_success()
    assert len(done.stdout.splitlines()) == 1 + len(last_evaluation(finished))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"(?m)^search_path: .*$", "search_path: null", config))
    done = command_line("evaluate", ".", *chosen, cwd=folder)
    assert done.code == 2
    assert len(done.errors) == 1
    assert f"curve would be imported from {folder}/curve.py" in done.errors[0]
    assert "--trust" in done.errors[0]


def test_predictions_are_in_dataset_order_on_any_number_of_processes(finished, monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    task = curve.Curve(width=6)
    model = task.build_model().eval()
    lanewise_model = lanewise.predict(finished, "held_out", devices=1)
    assert len(lanewise_model) == 15
    assert all(output.shape == (1,) for output in lanewise_model)
    shared = lanewise.predict(finished, "held_out", devices=3)
    assert all(map(torch.equal, shared, lanewise_model))
    from lanewise.runs.checkpoint.model_file import load_model

    load_model(model, finished / "model.safetensors")
    with torch.no_grad():
        whole = model(task.eval_datasets()["held_out"].tensors[0])
    torch.testing.assert_close(torch.stack(shared), whole)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is no finished run: there is no nowhere/config.yaml"),
        (["{run}/other.safetensors"], "there is no {run}/other.safetensors"),
        (["{run}", "--distributed.device", "2"], "Did you mean distributed.devices?"),
    ],
)
def test_evaluating_what_is_not_there_is_one_clear_error(finished, arguments, said):
    done = command_line("evaluate", *(argument.format(run=finished) for argument in arguments))
    assert done.code == 2
    assert len(done.errors) == 1
    assert said.format(run=finished) in done.errors[0]
    assert "Traceback" not in done.stderr


def test_weights_of_another_model_are_one_clear_error(finished):
    done = command_line("evaluate", finished, "--task.init_args.width", 7)
    assert done.code == 2
    assert "0.weight is (6, 1) in the file and (7, 1) in the model" in done.errors[0]


def options(folder: Path, **others) -> dict:
    return {**SECTIONS, "train": {"epochs": 1, "run_dir": str(folder / "run")}, **others}


def test_mistakes_in_the_sections_are_listed_all_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        lanewise.train(curve.Curve(), **options(tmp_path, precision="fp8", data={"workers": 1}))
    assert [mistake.split()[0] for mistake in caught.value.mistakes] == ["precision", "data.workers"]


def test_a_class_is_no_task(tmp_path):
    with pytest.raises(ConfigError, match=r"must be a lanewise\.Task: got <class .*Give it an object"):
        lanewise.train(curve.Curve, **options(tmp_path))


class WithLock(curve.Curve):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_task_that_cannot_be_sent_to_other_processes_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match=r"the task cannot be sent to worker processes: .*pickle"):
        lanewise.train(WithLock(), **options(tmp_path))


class Failing(curve.Curve):
    def forward(self, model, batch):
        raise ValueError("the curve is flat")


def test_the_exception_of_a_worker_is_an_error_here(tmp_path):
    before = dict(os.environ)
    with pytest.raises(LaunchError, match=r"rank 0 on [\s\S]*ValueError: the curve is flat"):
        lanewise.train(Failing(), **options(tmp_path))
    assert os.environ == before


class Wrong(curve.Curve):
    def loss(self, outputs, batch):
        return outputs.sum().detach()


def test_an_error_of_ours_is_raised_here_as_the_worker_raised_it(tmp_path):
    with pytest.raises(TaskError, match=r"\(rank 0 on ") as caught:
        lanewise.train(Wrong(), **options(tmp_path))
    assert isinstance(caught.value.__context__, LaunchError)  # which is not shown: it says the same
    assert caught.value.__context__.rank == 0


UNGUARDED = """
import lanewise
from tests.integration.curve import Curve

class Mine(Curve):
    pass

print("the script runs")
result = lanewise.train(
    Mine(),
    batch={"global_batch_size": 16, "micro_batch_size": 4},
    train={"max_steps": 2, "run_dir": "run"},
    optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
    distributed={"devices": 2},
)
assert lanewise.evaluate(result.run_dir) == dict(result.evaluation)
assert len(lanewise.predict(result.run_dir, "held_out")) > 0
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(tmp_path):
    """Its class is in the script, which evaluate imported by its name: so it trained again, and again."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = run(sys.executable, script, cwd=tmp_path, variables={"PYTHONPATH": str(ROOT)})
    assert (done.code, done.stdout) == (0, "the script runs\n"), done.stderr
    again = run(*LANEWISE, "evaluate", tmp_path / "run", cwd=tmp_path, variables={"PYTHONPATH": str(ROOT)})
    assert again.code == 2
    (error,) = again.errors
    assert "unguarded calls lanewise.train when it is imported. Put that call below if __name__ ==" in error


def test_there_is_no_model_before_a_run_has_ended(tmp_path):
    with pytest.raises(CheckpointError, match="is no finished run"):
        lanewise.evaluate(tmp_path)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """The script as a notebook: the class in one cell, its training in others."""
    source, _, _ = SCRIPT.read_text().partition('if __name__ == "__main__"')
    with Notebook(source) as opened:
        yield opened


@pytest.mark.slow
@quiet_kernel
def test_a_notebook_leaves_what_the_command_line_leaves_and_shows_lines(tmp_path, finished, notebook):
    messages = notebook.run(f"main({str(tmp_path / 'run')!r}, 2)")
    assert model_of(tmp_path / "run") == model_of(finished)
    streams = [message["content"] for message in messages if message["msg_type"] == "stream"]
    stdout, stderr = (
        "".join(stream["text"] for stream in streams if stream["name"] == name)
        for name in ("stdout", "stderr")
    )
    assert float(stdout.split()[0]) == last_evaluation(finished)["held_out/error"]
    assert "\x1b" not in stderr  # which a notebook does not obey
    assert len([line for line in stderr.splitlines() if "step 12/12" in line]) == 1, stderr


SLOW = """
import time
import lanewise
from torch import nn, ones

class Slow(lanewise.Task):
    def build_model(self):
        return nn.Linear(1, 1)

    def train_dataset(self):
        return ones(16, 1)

    def forward(self, model, batch):
        time.sleep(0.5)
        return model(batch)

    def loss(self, outputs, batch):
        return outputs.sum()
"""
"""Without a metric: torchmetrics takes four seconds in the kernel and in each worker."""


INTERRUPTED = f"""
import os
import signal
import threading
import time
from pathlib import Path

{SLOW}
    def train_dataset(self):
        Path(f"worker-{{os.getpid()}}").touch()
        return ones(32, 1)

    def forward(self, model, batch):
        if Path("run/metrics.jsonl").exists():
            time.sleep(3600)  # the second step does not end before the interrupt, however slow the machine is
        return model(batch)


def interrupt():
    while not Path("run/metrics.jsonl").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt).start()
sections = {{SECTIONS}}
try:
    lanewise.train(Slow(), **sections)
except KeyboardInterrupt as interrupted:
    print(interrupted)
print([Path(f"/proc/{{worker.name.removeprefix('worker-')}}").exists() for worker in Path().glob("worker-*")])
"""


def test_an_interrupt_is_raised_here_and_leaves_no_process(tmp_path):
    """As in a cell of a notebook, whose kernel and server take 11 s of CPU to import what they need."""
    sections = options(Path(), distributed={"devices": 2, "equality": "exact"})
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED.replace("{SECTIONS}", repr(sections)))
    assert run_script(script, cwd=tmp_path).splitlines() == ["no checkpoint was saved yet", "[False, False]"]


@pytest.mark.slow
@quiet_kernel
def test_interrupting_a_cell_leaves_no_process(tmp_path):
    sections = options(tmp_path, distributed={"devices": 2, "equality": "exact"})
    with Notebook(SLOW) as notebook:
        notebook.begin(f"lanewise.train(Slow(), **{sections!r})")
        wait_for((tmp_path / "run" / "metrics.jsonl").exists)
        assert len(pids(Notebook.MARKER)) >= 3  # the kernel and two workers
        assert notebook.interrupt() == "KeyboardInterrupt"
        wait_for(lambda: len(pids(Notebook.MARKER)) == 2)  # the kernel, and what it forks workers from


def pids(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


class Given(curve.Curve):
    """Takes its data as an object, and other arguments by name."""

    def __init__(self, data: torch.Tensor, **others) -> None:
        super().__init__(**others)
        self.data = data

    def train_dataset(self):
        return TensorDataset(self.data, self.data**2)


def test_a_task_that_was_made_of_objects_is_given_again_to_evaluate(tmp_path):
    task = Given(torch.linspace(-1, 1, 30).unsqueeze(1), width=5)
    result = lanewise.train(task, **options(tmp_path, distributed={"equality": "exact"}))
    with pytest.raises(CheckpointError, match=r"init_args.data was an object of torch\.Tensor"):
        lanewise.evaluate(result.run_dir)
    assert lanewise.evaluate(result.run_dir, task=task, devices=2) == result.evaluation
    assert len(lanewise.predict(result.run_dir, "held_out", task=task)) == 10
    assert (result.run_dir / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
