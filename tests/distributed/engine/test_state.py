"""What lanes give for the whole step: kinds of losses, wrong use, own loops, and steps without an update."""

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import nn

from lanewise import Loss, Task
from lanewise.config import CheckpointConfig, EveryConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.commands.test_verify import _fast_processes, verify  # noqa: F401 - a fixture
from tests.distributed.mistakes import rank
from tests.distributed.runs.test_log import fit
from tests.distributed.tasks import Sentences, Smooth, configure, state_bytes
from tests.script import run_script
from tests.slow import slow


class Queue(Smooth):
    """A queue of what the first tokens gave, and counts of all tokens; noise after each update."""

    step_state = ("state.queue", "state.counts")

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.state = nn.Identity()
        model.state.register_buffer("queue", torch.zeros(40, 8, dtype=torch.float64))
        model.state.register_buffer("counts", torch.zeros(31, dtype=torch.int64))
        return model

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        counts = batch.flatten().bincount(minlength=31)
        gather = {"rows": outputs[:, 0, :8], "long": (batch[batch > 9],)}
        total = {"counts": counts, "mean": {"x": outputs.mean((0, 1)).bfloat16()}}
        return dataclasses.replace(loss, gather=gather, total=total)

    def after_update(self, model: nn.Module, step: Any) -> None:
        assert step.num_samples <= 8
        model.state.queue.copy_(torch.cat([step.gathered["rows"], model.state.queue])[:40])
        model.state.counts.add_(step.totals["counts"])
        model[1].bias.add_(step.totals["mean"]["x"].sum() * 1e-3 + 1e-3 * torch.randn(()))
        model[1].bias.add_(1e-6 * step.gathered["long"][0].sum() + step.progress.number)


class ByBatch(Queue):
    """The same of a loss of all samples, padded to one length."""

    def collate(self, samples: list[Any]) -> torch.Tensor:
        batch = super().collate(samples)
        return nn.functional.pad(batch, (0, 9 - batch.shape[1]))

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Loss:
        return Queue.loss(self, outputs, inputs)

    loss = Task.loss

    def batch_loss_inputs(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


class ByRows(ByBatch):
    batch_loss = Task.batch_loss

    def row_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Loss:
        return Queue.loss(self, outputs[rows], inputs[rows])


def train(world: World, task: type[Queue], changes: dict[str, Any]) -> dict[str, bytes]:
    set_determinism("exact", threads=1)
    arguments = {"num_lanes": 4, "steps": 8, "optimizer": "torch.optim.SGD", **changes}
    engine = build_engine(configure(task, **arguments), world)
    for _ in engine.steps():
        pass
    return state_bytes(engine.training.model)


@pytest.mark.parametrize("task", [Queue, ByBatch, ByRows])
@pytest.mark.parametrize("precision", ["bf16", *slow("float32", "fp16")])
def test_it_is_the_same_on_any_number_of_processes(task, precision):
    (expected,) = run_distributed(train, 1, task, {"precision": precision})
    for num_processes, one_machine in ((3, False), (4, True)):
        for of_rank in run_distributed(
            train, num_processes, task, {"precision": precision}, one_machine=one_machine
        ):
            assert of_rank == expected
    counts = torch.frombuffer(bytearray(expected["state.counts"]), dtype=torch.int64)
    num_samples = 53 + 8  # an epoch has seven steps, the last one of them of five samples
    assert counts[1:].sum() > 2 * num_samples


def test_it_goes_on_with_another_number_of_processes(tmp_path):
    """In the middle of an epoch, and from what the files have."""

    def parts(*num_processes: int) -> bytes:
        folder = tmp_path / "-".join(map(str, num_processes))
        for part, number in enumerate(num_processes, 1):
            steps = 10 if part == len(num_processes) else 5 * part
            config = configure(Queue, num_lanes=4, steps=steps, optimizer="torch.optim.SGD")
            every = CheckpointConfig(every=EveryConfig(steps=5), keep_last=9)
            first_steps = run_distributed(
                fit, number, dataclasses.replace(config, checkpoint=every), str(folder)
            )
            assert first_steps == [5 * (part - 1)] * number
        return (folder / "model.safetensors").read_bytes()

    assert parts(1) == parts(3, 1) == parts(1, 2)


class OverflowsOnce(Queue):
    """The second step overflows in fp16; the third has no weight."""

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    def build_model(self) -> nn.Module:
        return super().build_model().float()

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        step = self.progress.number
        factor = 1e30 if step == 1 else 1.0
        return dataclasses.replace(loss, sum=loss.sum * factor, weight=0.0 if step == 2 else loss.weight)

    def after_update(self, model: nn.Module, step: Any) -> None:
        model.state.counts[step.progress.number] += 1


def updates(world: World) -> list[int]:
    config = configure(OverflowsOnce, num_lanes=4, steps=4, optimizer="torch.optim.SGD", precision="fp16")
    engine = build_engine(config, world)
    for _ in engine.steps():
        pass
    return engine.training.model.state.counts[:4].tolist()


def test_a_step_that_overflows_or_weighs_nothing_is_followed_by_nothing():
    assert run_distributed(updates, 1)[0] == [1, 0, 0, 1]


class OtherWidth(Queue):
    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        width = int(batch[0, 0]) % 3 + 1
        return dataclasses.replace(loss, gather={"rows": outputs[:, 0, :width]}, total=None)


class SomeName(Queue):
    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        return loss if int(batch[0, 0]) % 2 else dataclasses.replace(loss, gather=None)


class Later(Queue):
    """A lane gives something else in a later step."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        is_first = self.progress.number < 2 or int(batch[0, 0]) % 2
        return loss if is_first else dataclasses.replace(loss, total=None)


class ReadsRank(Queue):
    def after_update(self, model: nn.Module, step: Any) -> None:
        model.state.queue.add_(rank())


class LaneWrites(Queue):
    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.state.queue[0].add_(1)
        return super().forward(model, batch)


class LateOnOneRank(Smooth):
    """Gives something for the first time in a later step, in the lanes of one rank."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        late = self.progress.number > 1 and rank() == 1
        return dataclasses.replace(loss, gather={"rows": outputs[:, 0]}) if late else loss


class NoSuchBuffer(Queue):
    step_state = ("queue",)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (OtherWidth, r"lanes of step 1 give different things.*\[rows, \d\] float64"),
        (SomeName, "lanes of step 1 give different things"),
        (Later, "lanes of step [34] give different things .*lane of the first step: gather"),
        (ReadsRank, "buffer state.queue differs between ranks 0 and 1 after step 1"),
        (LaneWrites, "buffer state.queue changed in the forward or the loss of lane .* step_state says"),
        (LateOnOneRank, r"lanes of step 3 give different things.*first step: nothing\n  lane 2: gather rows"),
        (NoSuchBuffer, "step_state names queue, and the model has no such buffer"),
    ],
)
def test_wrong_use_is_one_clear_error_on_every_rank(task, expected):
    for told in run_distributed(refusal, 2, task):
        assert told is not None
        with pytest.raises(RuntimeError, match=f"(?s){expected}"):
            raise RuntimeError(told)


def refusal(world: World, task: type[Queue]) -> str | None:
    try:
        train(world, task, {})
    except Exception as error:  # noqa: BLE001 - whatever it says
        return str(error)
    return None


class Several(Queue):
    """Two losses, each with a name of its own."""

    def loss_weights(self, batch: torch.Tensor) -> Any:
        return [(batch[:, 1:] != 0).sum(), len(batch)]

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        words = super().loss(outputs, batch)
        counts = words.total["counts"]
        first = dataclasses.replace(words, total={"mean": words.total["mean"]})
        return [first, Loss.mean(outputs.square().mean(), len(batch), total={"counts": counts})]


class SeveralUnknown(Several):
    def loss_weights(self, batch: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [(Queue, "torch.optim.LBFGS"), (Several, "torch.optim.SGD"), (SeveralUnknown, "torch.optim.SGD")],
)
def test_closures_and_several_losses_give_the_same_on_any_number_of_processes(task, optimizer):
    changes = {"optimizer": optimizer, "lr": 0.01}
    (expected,) = run_distributed(train, 1, task, changes)
    for of_rank in run_distributed(train, 3, task, changes):
        assert of_rank == expected
    counts = torch.frombuffer(bytearray(expected["state.counts"]), dtype=torch.int64)
    tokens = sum(len(sentence) for sentence in Sentences(53).sentences)  # once in each epoch, in any order
    assert tokens < counts[1:].sum() < 2 * tokens


class AsksTheTime(Queue):
    def after_update(self, model: nn.Module, step: Any) -> None:
        model.state.queue[0] = time.perf_counter_ns()


class DrawsByItself(Queue):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.state.noise = torch.Generator().manual_seed(3)
        return model

    def after_update(self, model: nn.Module, step: Any) -> None:
        model[1].bias.add_(torch.randn(8, generator=model.state.noise))


class MovesAWeightByRank(Queue):
    def after_update(self, model: nn.Module, step: Any) -> None:
        model[1].bias.add_(1.0 + rank())


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (AsksTheTime, "after_update of step 1, run again from the same state, gives a different state.queue"),
        (DrawsByItself, "after_update of step 1, run again from the same state, gives a different 1.bias"),
        (MovesAWeightByRank, "1.bias differs between ranks 0 and 1 of 2 processes after step 1"),
        (ReadsRank, "buffer state.queue differs between ranks 0 and 1 after step"),
        (Queue, None),
    ],
)
def test_verify_names_what_after_update_makes_otherwise(task, expected):
    report = verify(configure(task, num_lanes=4, optimizer="torch.optim.SGD"))
    assert report.is_verified == (expected is None)
    if expected is not None:
        assert expected in "".join(finding.evidence for finding in report.findings)


OWN_LOOP = """
import torch
from torch import nn
from torch.nn.functional import normalize
import lanewise

lanes = lanewise.Lanes(global_batch_size=8, micro_batch_size=2, equality="exact")
model = nn.Linear(4, 4)
model.register_buffer("queue", torch.zeros(12, 4))
model = lanes.prepare(model, step_state=("queue",))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(21, 4, generator=torch.Generator().manual_seed(0)))
for _ in range(2):
    for step in lanes.steps(data):
        for (batch,) in step:
            keys = model(batch)
            loss = (keys.square().sum(1) + (keys @ model.queue.T).sum(1)).mean()
            given = {"gather": {"keys": keys}, "total": {"n": batch.sum(0)}}
            step.backward(lanewise.Loss.mean(loss, len(batch), **given))
        optimizer.step()
        if step.allows_update:
            with torch.no_grad():
                model.queue.copy_(torch.cat([step.gathered["keys"], model.queue])[:12])
                model.bias.add_(step.totals["n"], alpha=1e-3)
lanes.save_model(model, "model.safetensors")
"""


def test_an_own_loop_has_the_rows_and_totals_of_all_lanes(tmp_path):
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    models = []
    for num_processes in (1, 3):
        run_script(tmp_path / "loop.py", cwd=tmp_path, num_processes=num_processes)
        models.append((tmp_path / "model.safetensors").read_bytes())
    assert models[0] == models[1]


class Named(Queue):
    """Gives under two names what is alike but for its values: each lane in the same order."""

    swaps = False

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        loss = Smooth.loss(self, outputs, batch)
        counts = batch.flatten().bincount(minlength=31)
        parts = {
            "gather": {"first": outputs[:, 0, :8], "second": outputs[:, 1, :8]},
            "total": {"counts": counts, "twice": 2 * counts},
            "metrics": {"one": (1.0 * len(batch), len(batch)), "two": (2.0 * len(batch), len(batch))},
        }
        if self.swaps and int(batch[0, 0]) % 2:
            parts = {kind: dict(reversed(names.items())) for kind, names in parts.items()}
        return dataclasses.replace(loss, **parts)

    def after_update(self, model: nn.Module, step: Any) -> None:
        model.state.queue.copy_(torch.cat([step.gathered["first"], model.state.queue])[:40])
        model.state.counts.add_(step.totals["counts"])
        model[1].bias.add_(step.gathered["second"].sum() * 1e-3 + step.totals["twice"].sum() * 1e-6)


class OfTerms(Named):
    """The same in two terms, each of which has one of the names."""

    def loss_weights(self, batch: torch.Tensor) -> Any:
        return [(batch[:, 1:] != 0).sum()] * 2

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        loss = super().loss(outputs, batch)
        kinds = {"gather": loss.gather, "total": loss.total, "metrics": loss.metrics}
        return [
            dataclasses.replace(
                loss, **{kind: dict([[*given.items()][number]]) for kind, given in kinds.items()}
            )
            for number in range(2)
        ]


class Swapped(Named):
    swaps = True


class SwappedTerms(OfTerms):
    swaps = True


class SwappedOutputs(ByBatch):
    """Outputs of a loss of all samples, under names in another order."""

    def forward(self, model: nn.Module, batch: torch.Tensor) -> Any:
        outputs = super().forward(model, batch)
        named = {"outputs": outputs, "twice": 2 * outputs}
        return dict(reversed(named.items())) if int(batch[0, 0]) % 2 else named

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        return super().batch_loss(model, outputs["outputs"], inputs)


@pytest.mark.parametrize(("task", "in_order"), [(Swapped, Named), (SwappedTerms, OfTerms)])
def test_what_lanes_give_is_paired_by_name_in_whatever_order_each_has_it(task, in_order):
    """What one lane gave under a name became that of another name of the next lane."""
    (expected,) = run_distributed(train, 1, in_order, {})
    assert run_distributed(train, 1, task, {}) == [expected]
    assert run_distributed(train, 3, task, {}) == [expected] * 3


def test_outputs_of_all_lanes_under_names_in_another_order_are_refused():
    for told in run_distributed(refusal, 2, SwappedOutputs):
        assert told is not None
        assert "do not make one batch" in told
