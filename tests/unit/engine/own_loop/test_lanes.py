"""The engine's parts in a loop of one's own: they give the bytes of the trainer."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lanewise import Lanes, Loss, checkpoint_activations
from lanewise.engine.own_loop import lanes as own_loop
from lanewise.engine.samples import dataset
from lanewise.errors import CheckpointError, ConfigError, DataError, TaskError
from lanewise.processes.watch.watch import Watch
from lanewise.processes.world.environment import Environment
from lanewise.processes.world.world import LocalWorld
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, TinyTransformer, configure, train
from tests.slow import slow

SAMPLES = 53  # in steps of 16: the fourth step of an epoch has 5 samples on 3 of the 8 lanes
WORLDS = pytest.mark.parametrize("world_size", [*slow(2), 3])


def make_lanes(world, **options: Any) -> Lanes:
    """Make lanes in a world that is there already, instead of one that a launcher prepared."""
    own_loop.join = lambda *_: (world, Watch())  # type: ignore[assignment]
    place = Environment(world.rank, world.rank, world.world_size, world.world_size)
    own_loop.Environment = functools.partial(Environment)  # type: ignore[assignment, misc]
    own_loop.Environment.from_env = lambda _: place  # type: ignore[attr-defined]
    return Lanes(**{"global_batch_size": 16, "micro_batch_size": 2, "equality": "exact", **options})


def state_of(*models: nn.Module) -> list[dict[str, bytes]]:
    return [{name: t.numpy().tobytes() for name, t in model.state_dict().items()} for model in models]


class Pieces:
    """A lane-aware stream with so many samples in each lane."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Any:
        return (torch.arange(4.0) + epoch + lane + number for number in range(self.lengths[lane]))


def language(world, folder=None, last_step=9, is_checkpointed=False):
    """Train the task `Language`, saving after each step where a folder is given; its block may run again."""
    task = Language(SAMPLES)
    lanes = make_lanes(world)
    model = TinyTransformer()
    if is_checkpointed:
        checkpoint_activations(model, ["TransformerEncoderLayer"])
    model = lanes.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, T_max=20) if folder else None
    checkpoints = folder and lanes.checkpoints(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    first_step = checkpoints.step if checkpoints else 0
    steps = lanes.steps(task.train_dataset(), collate=task.collate, first_step=first_step)
    losses: list[float] = []
    while steps.epoch < 3:
        for step in steps:
            assert step.number == first_step + len(losses)
            for batch in step:
                step.backward(task.loss(model(batch), batch))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step.loss)
            if scheduler is not None:
                scheduler.step()
                checkpoints.save(step.number + 1)
            if step.number + 1 == last_step:
                if checkpoints:
                    checkpoints.finish()
                return state_of(model)[0], losses
    raise AssertionError("too few steps")


def prepare_twice(world):
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    with pytest.raises(TaskError, match=r"this model was prepared before. Call lanes.prepare\(model\) once"):
        lanes.prepare(model)
    lanes.close()


def test_a_model_is_prepared_once():
    run_distributed(prepare_twice, 1)


@pytest.mark.parametrize(("world_size", "is_checkpointed"), [(2, False), (3, True), *slow((1, False))])
def test_a_transformer_ends_with_the_bytes_and_losses_of_the_trainer(world_size, is_checkpointed):
    expected = run_distributed(train, 1, configure(Language, steps=9, num_samples=SAMPLES))[0]
    for result in run_distributed(language, world_size, None, 9, is_checkpointed):
        assert result == expected


def test_going_on_in_the_middle_of_an_epoch_on_more_processes_gives_the_same_bytes(tmp_path):
    state, losses = run_distributed(language, 1, str(tmp_path / "untouched"))[0]
    run_distributed(language, 1, str(tmp_path / "stopped"), 2)
    run_distributed(language, 3, str(tmp_path / "stopped"), 5)
    for result in run_distributed(language, 2, str(tmp_path / "stopped")):
        assert result == (state, losses[5:])


def other_model(world, folder):
    lanes = make_lanes(world, seed=1)
    model = lanes.prepare(nn.Linear(2, 1))
    with pytest.raises(CheckpointError) as caught:
        lanes.checkpoints(folder, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    return str(caught.value)


def test_a_checkpoint_of_another_run_is_one_error_that_lists_all(tmp_path):
    run_distributed(language, 1, str(tmp_path), 1)
    (said,) = run_distributed(other_model, 1, str(tmp_path))
    for part in ("seed was 0, and is 1 now", "model weight is not in it", "has a state of scheduler"):
        assert part in said


def going_on(world, folder):
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    lanes.checkpoints(folder, model=model).save(1)
    lanes.close()
    lanes.close()  # no harm in a second time


def test_the_leftovers_of_a_killed_save_go_when_a_run_goes_on(tmp_path):
    """They stayed once, where there was a good checkpoint: gigabytes with each kill."""
    for _ in range(2):
        leftover = tmp_path / "step-000007.tmp-1"
        leftover.mkdir()
        run_distributed(going_on, 1, str(tmp_path))
        assert not leftover.exists()


def save_a_model(world, folder):
    lanes = make_lanes(world)
    lanes.save_model(lanes.prepare(nn.Linear(2, 1)), f"{folder}/a/new/model.safetensors")


def test_a_model_is_saved_to_a_folder_that_is_made(tmp_path):
    run_distributed(save_a_model, 1, str(tmp_path))
    assert (tmp_path / "a" / "new" / "model.safetensors").exists()


def an_optimizer_without_its_model(world, folder):
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    with pytest.raises(CheckpointError) as caught:
        lanes.checkpoints(folder, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    return str(caught.value)


def test_an_optimizer_without_its_model_is_an_error_before_the_first_step(tmp_path):
    (said,) = run_distributed(an_optimizer_without_its_model, 1, str(tmp_path))
    assert "a parameter of the optimizer, of shape (1, 2), is in none of the saved modules" in said


class Carried:
    """State that a loop carries from step to step."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def save_carried(world, folder):
    """Save objects whose state is the same on both ranks, then one and another that differ."""
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = {name: nn.Parameter(torch.full((3,), 1.5)) for name in sorted("ab", reverse=world.rank > 0)}
    carried, other = Carried(values), nn.BatchNorm1d(2)
    checkpoints = lanes.checkpoints(folder, model=model, optimizer=optimizer, carried=carried, other=other)
    checkpoints.save(1)
    said = []
    other.running_mean[0] = world.rank
    for kept in (values, {**values, "seconds": 0.5 * world.rank}):
        carried.value = kept
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(2)
        said.append(str(caught.value))
    checkpoints.finish()
    return said


def test_a_state_that_differs_between_processes_is_not_saved(tmp_path):
    """A hidden state of which each process had its own columns was restored as that of one process."""
    for rank, (first, second) in enumerate(run_distributed(save_carried, 2, str(tmp_path))):
        ranks = f"differs between processes (ranks {rank} and {1 - rank})"
        assert first.startswith(f"the state of other {ranks}")
        assert second.startswith(f"the state of carried {ranks}")
        assert "gather it from all of them before saving" in second
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]
    assert run_distributed(save_alone, 1, str(tmp_path / "one")) == [None]


def save_alone(world, folder):
    make_lanes(world).checkpoints(folder, carried=Carried(0.5)).save(1)


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 30, (index / 30) ** 2])


def gan(world):
    """A generator and a discriminator with dropout and BatchNorm, two optimizers, clipping for each."""
    lanes = make_lanes(world)
    generator = lanes.prepare(
        nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
    )
    discriminator = lanes.prepare(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    steps = lanes.steps(Points())
    losses = []
    for _ in range(3):
        for step in steps:
            for real in step.batches(discriminator):
                fake = generator(torch.randn(len(real), 3)).detach()
                step.backward(
                    F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
                )
            nn.utils.clip_grad_norm_(discriminator.parameters(), 0.5)
            of_discriminator.step()
            losses.append(step.loss)
            for real in step.batches(generator):
                step.backward(F.softplus(-discriminator(generator(torch.randn(len(real), 3)))).mean())
            nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
            of_generator.step()
            losses.append(step.loss)
    return state_of(generator, discriminator), losses


@WORLDS
def test_a_gan_with_two_optimizers_ends_with_the_same_bytes(world_size):
    alone = run_distributed(gan, 1)[0]
    assert len(set(alone[1])) == len(alone[1]) == 12
    for result in run_distributed(gan, world_size):
        assert result == alone


class Counting(nn.Linear):
    num_calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(inputs) * self.num_calls


def second_astray(world):
    """Train two models, of which the second has a block that goes by a counter."""
    lanes = make_lanes(world)
    first, second = (nn.Sequential(kind(2, 1)) for kind in (nn.Linear, Counting))
    for model in (first, second):
        lanes.prepare(checkpoint_activations(model, ["0"]))

    def train() -> None:
        for model in (first, second):
            for step in lanes.steps(Points()):
                for batch in step.batches(model):
                    step.backward(model(batch).mean())

    with pytest.raises(TaskError) as caught:
        train()
    return str(caught.value)


def test_each_model_compares_the_runs_of_its_blocks_in_a_first_step_of_its_own():
    (said,) = run_distributed(second_astray, 1)
    assert "0, a Counting, returned something else when it ran again" in said


def draws(world):
    lanes = make_lanes(world)
    first, second = lanes.prepare(nn.Linear(2, 1)), lanes.prepare(nn.Linear(2, 1))
    drawn = []
    for step in lanes.steps(Points()):
        for model in (first, second, first):
            for batch in step.batches(model):
                drawn.append((torch.rand(()).item(), batch.tolist()))
                step.backward(model(batch).mean())
    return drawn


def test_every_pass_of_a_step_has_the_same_batches_and_other_random_numbers():
    drawn = run_distributed(draws, 1)[0]
    first_step = drawn[:8], drawn[8:16], drawn[16:24]
    assert all(
        [batch for _, batch in of_rank] == [batch for _, batch in first_step[0]] for of_rank in first_step
    )
    assert len({number for number, _ in drawn}) == len(drawn)


def draws_of_batch_losses(world) -> list[float]:
    """Return what each pass of a step draws in its forward, its loss and its backward."""
    drawn: list[float] = []

    class Drawing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(_ctx, gradient):
            drawn.append(torch.rand(()).item())
            return gradient

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(()).item())
        return outputs.square().mean()

    lanes = make_lanes(world)
    models = [lanes.prepare(nn.Linear(2, 1)) for _ in range(2)]
    steps = lanes.steps(Points())
    for step in (step for _epoch in range(2) for step in steps):
        if step.number == 2:  # before, lanes run again with the same numbers
            drawn.clear()
        for model in (*models, models[0]):
            step.batch_loss(lambda batch, model=model: Drawing.apply(model(batch)), loss, model)
    return drawn


def test_every_loss_of_all_samples_in_a_step_draws_other_random_numbers():
    """Its loss and its backward drew the numbers of the first pass again."""
    drawn = run_distributed(draws_of_batch_losses, 1)[0]
    assert len(set(drawn)) == len(drawn)


def draws_of_one(world):
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    passes = []
    for step in lanes.steps(Points()):
        for _ in range(2):
            passes.append([])
            for batch in step:
                passes[-1].append(batch.tolist())
                step.backward(model(batch).mean())
    return passes


def test_passes_over_the_steps_of_two_streams_leave_the_same_bytes():
    """One with a loss of all samples; the end of a lane is told once, by the first pass of a step."""

    def loop(world) -> Any:
        lanes = make_lanes(world)
        models = [lanes.prepare(nn.Linear(4, 3)) for _ in range(2)]
        streams = [lanes.steps(Pieces(*lengths)) for lengths in ((9, 2, 0, 7, 4, 4, 3, 1), (1, 5, *[2] * 6))]
        numbers: list[tuple[int, int]] = []
        for steps in streams * 2:
            for step in steps:
                numbers.append((step.epoch, step.number))
                for batch in step.batches(models[0]):
                    step.backward(models[0](batch).square().mean())
                step.batch_loss(models[1], lambda outputs: outputs.std(), models[1])
                for parameter in (parameter for model in models for parameter in model.parameters()):
                    parameter.data -= 0.1 * parameter.grad
        return numbers, state_of(*models)

    first = [(0, step) for step in range(5)] + [(0, step) for step in range(3)]
    alone = loop(LocalWorld(torch.device("cpu")))
    assert alone[0] == first + [(1, step) for step in range(5, 10)] + [(1, step) for step in range(3, 6)]
    assert run_distributed(loop, 2) == [alone] * 2


def test_a_second_pass_of_a_single_model_has_the_same_batches():
    """It read those of the next step once, as sharpness-aware minimisation would have noticed late."""
    passes = run_distributed(draws_of_one, 1)[0]
    assert passes[0] == passes[1] != passes[2] == passes[3]


def siamese(world):
    """Several forwards before a backward."""
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in lanes.steps(Points()):
        for batch in step:
            near, far = model(batch), model(1 - batch)
            step.backward(Loss(((near - far) ** 2).sum(), weight=2 * len(batch)))
        optimizer.step()
    return state_of(model)


@WORLDS
def test_several_forwards_before_a_backward_end_with_the_same_bytes(world_size):
    alone = run_distributed(siamese, 1)[0]
    for result in run_distributed(siamese, world_size):
        assert result == alone


def count(world, num_samples):
    lanes = make_lanes(world)
    data = TensorDataset(torch.arange(num_samples) % 5, (torch.arange(num_samples) // 3) % 5)
    accuracy = MulticlassAccuracy(num_classes=5, average="macro")
    values, num_seen = [], 0
    for _ in range(2):  # the metric is as good as new
        for guesses, labels in lanes.evaluate(data, accuracy):
            accuracy.update(guesses, labels)
            num_seen += len(labels)
        values.append(accuracy.compute().item())
    return values, num_seen


@pytest.mark.parametrize(
    ("world_size", "num_samples"),
    [(2, 53), (5, 3), *slow((1, 53), (1, 3), (2, 3), (5, 53))],
)
def test_a_metric_has_the_value_of_the_whole_set_and_each_sample_is_seen_once(world_size, num_samples):
    whole = MulticlassAccuracy(num_classes=5, average="macro")
    whole.update(torch.arange(num_samples) % 5, (torch.arange(num_samples) // 3) % 5)
    results = run_distributed(count, world_size, num_samples)
    assert all(values == [whole.compute().item()] * 2 for values, _ in results)
    assert sum(num_seen for _, num_seen in results) == 2 * num_samples


def overflow(world):
    lanes = make_lanes(world, precision="fp16")
    model = lanes.prepare(nn.Linear(2, 1))
    before = state_of(model)
    step = next(iter(lanes.steps(Points())))
    for batch in step:
        with lanes.autocast():
            loss = (model(batch) * 1e4).sum()
        step.backward(loss)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return state_of(model) == before, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_whose_fp16_gradient_overflowed_leaves_none(world_size):
    for result in run_distributed(overflow, world_size):
        assert result == (True, [None, None])


def no_backward(lanes, model):
    for _batch in next(iter(lanes.steps(Points()))):
        pass


def two_backwards(lanes, model):
    step = next(iter(lanes.steps(Points())))
    for batch in step:
        step.backward(model(batch).mean())
        step.backward(model(batch).mean())


def half_a_step(lanes, model):
    for step in lanes.steps(Points()):
        for batch in step:
            step.backward(model(batch).mean())
            break


def all_but_the_end_of_a_step(lanes, model):
    """Leaves after the last micro-batch, before the gradients are added over the processes."""
    for step in lanes.steps(Points()):
        for number, batch in enumerate(step):
            step.backward(model(batch).mean())
            if number == 7:
                break


def whose_gradients(lanes, model):
    lanes.prepare(nn.Linear(1, 1))
    for _batch in next(iter(lanes.steps(Points()))):
        pass


def vector(lanes, model):
    step = next(iter(lanes.steps(Points())))
    for batch in step:
        step.backward(model(batch))


def loss_too_early(lanes, model):
    for step in lanes.steps(Points()):
        for batch in step:
            step.backward(model(batch).mean())
            step.loss  # noqa: B018 - too early


def another_model(lanes, model):
    for _batch in next(iter(lanes.steps(Points()))).batches(nn.Linear(1, 1)):
        pass


TWICE = (
    "backward was called twice for one micro-batch, or outside of the loop over them. Add the losses of a "
    "micro-batch up and call it once; their graphs are in memory until then. If that is too much"
)


def misuse(world, use):
    lanes = make_lanes(world)
    try:
        use(lanes, lanes.prepare(nn.Linear(2, 1)))
    except TaskError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            no_backward,
            "a lane of step 1 had no backward. Call step.backward(loss), which is not loss.backward()",
        ),
        (two_backwards, TWICE),
        (all_but_the_end_of_a_step, "step 1 was left before its micro-batches were done"),
        (half_a_step, "step 1 was left before its micro-batches were done"),
        (whose_gradients, "2 models were prepared"),
        (
            vector,
            "the loss given to backward must be a scalar tensor or a Loss: got a tensor of shape (2, 1)",
        ),
    ],
)
def test_a_misuse_is_one_clear_error(use, said):
    assert run_distributed(misuse, 1, use)[0].startswith(said)


def pinned(world):
    lanes = make_lanes(world)
    lanes.prepare(nn.Linear(2, 1))
    warnings.simplefilter("ignore", UserWarning)  # of torch's loader, which finds no accelerator
    dataset.has_streams = lambda _: True  # as on one
    loaders = [lanes.steps(Points(), **pins)._loader for pins in ({}, {"pin_memory": False})]
    return [loader.pin_memory for loader in loaders]


def test_batches_are_pinned_for_an_accelerator_unless_the_loop_says_otherwise():
    """As a task has it: page-locked memory is limited in some containers."""
    assert run_distributed(pinned, 1) == [[True, False]]


def cosine(world):
    """What the example does, with a scheduler."""
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = lanes.steps(Points(), order="sequential", drop_last=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=2 * len(steps))
    seen = []
    for epoch in range(2):
        for step in steps:
            assert step.epoch == epoch
            for batch in step:
                seen.extend(batch[:, 0].mul(30).round().int().tolist())
                step.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
    assert steps.epoch == 2
    return seen, scheduler.last_epoch


def test_steps_are_counted_without_shuffling_or_the_last_one():
    assert run_distributed(cosine, 1)[0] == ([*range(16), *range(16)], 2)


class Drawing(Dataset[torch.Tensor]):
    """Says which it is, and draws."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.number, torch.rand(())])


def read_two(world, folder, last_step):
    """Return what a loop reads of a dataset, of the same once more, and of another one, after `last_step`."""
    lanes = make_lanes(world, global_batch_size=8)
    model = lanes.prepare(nn.Linear(2, 1))
    checkpoints = lanes.checkpoints(folder, model=model)
    first = checkpoints.step
    drawn = []
    for number in (0, 0, 1):
        step = next(iter(lanes.steps(Drawing(number), order="sequential", first_step=first)))
        drawn.append([])
        for batch in step:
            drawn[-1] += batch[:, 1].tolist()
            step.backward(model(batch).mean())
    checkpoints.save(last_step)
    checkpoints.finish()
    return [number for of_lanes in drawn for of_rank in world.all_gather_tree(of_lanes) for number in of_rank]


def test_datasets_of_a_loop_draw_other_numbers_and_a_run_that_goes_on_the_same(tmp_path):
    """The same crops came from two datasets, step by step."""
    first = run_distributed(read_two, 1, str(tmp_path / "one"), 0)[0]
    assert len(set(first)) == 3 * 8
    assert run_distributed(read_two, 2, str(tmp_path / "two"), 3)[0] == first
    second = run_distributed(read_two, 1, str(tmp_path / "two"), 3)[0]
    assert run_distributed(read_two, 3, str(tmp_path / "two"), 3)[0] == second
    assert not set(first) & set(second)


def other_dataset(world, folder, *, steps_first):
    """Go on with a run of other samples, and with one of the same; return what was said."""
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    samples = [TensorDataset(torch.full((8, 2), value)) for value in (0.0, 1.0)]
    checkpoints = lanes.checkpoints(folder, model=model)
    lanes.steps(samples[0])
    checkpoints.save(1)
    checkpoints.finish()
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    lanes.checkpoints(folder, model=model)
    lanes.steps(samples[0])
    lanes.steps(samples[1])  # a loop may take another one later
    lanes = make_lanes(world)
    model = lanes.prepare(nn.Linear(2, 1))
    calls = [lambda: lanes.steps(samples[1]), lambda: lanes.checkpoints(folder, model=model)]
    first, second = calls if steps_first else reversed(calls)
    first()
    with pytest.raises(CheckpointError) as caught:
        second()
    return str(caught.value)


@pytest.mark.parametrize("steps_first", [False, True])
def test_a_loop_that_goes_on_with_other_samples_is_an_error(tmp_path, steps_first):
    function = functools.partial(other_dataset, steps_first=steps_first)
    (said,) = run_distributed(function, 1, str(tmp_path))
    assert "step-000001 is of another run." in said
    assert "dataset was {'num_samples': 8" in said


def other_precision(world, folder):
    lanes = make_lanes(world)
    checkpoints = lanes.checkpoints(folder, model=lanes.prepare(nn.Linear(2, 1)))
    checkpoints.save(1)
    checkpoints.finish()
    lanes = make_lanes(world, precision="bf16", equality="close")
    with pytest.raises(CheckpointError) as caught:
        lanes.checkpoints(folder, model=lanes.prepare(nn.Linear(2, 1)))
    return str(caught.value)


def test_a_loop_of_another_precision_or_equality_is_another_run(tmp_path):
    (said,) = run_distributed(other_precision, 1, str(tmp_path))
    assert "precision was float32, and is bf16 now" in said
    assert "exact was {" in said


def evaluate_nothing(world):
    lanes = make_lanes(world)
    with pytest.raises(DataError) as caught:
        next(lanes.evaluate(TensorDataset(torch.ones(0, 2))))
    return str(caught.value)


def test_a_dataset_without_samples_cannot_be_evaluated_on():
    assert run_distributed(evaluate_nothing, 1) == [
        "the eval dataset TensorDataset is empty. Check its path, or leave it out."
    ]


def compressed(world, compression):
    lanes = make_lanes(world, equality="close", seed=1)
    task, model = Language(SAMPLES), lanes.prepare(TinyTransformer(), compression=compression)
    step = next(iter(lanes.steps(task.train_dataset(), collate=task.collate)))
    for batch in step:
        step.backward(task.loss(model(batch), batch))
    return step.loss, model.head.weight.grad


def test_the_gradients_of_a_model_may_travel_compressed():
    (loss, whole), _ = run_distributed(compressed, 2, None)
    for found, rounded in run_distributed(compressed, 2, "bf16"):
        assert found == loss
        assert not torch.equal(rounded, whole)
        assert torch.allclose(rounded, whole, rtol=0.05, atol=1e-3)


def refuse_compression(world, compression, options):
    with pytest.raises(ConfigError) as caught:
        make_lanes(world, **options).prepare(TinyTransformer(), compression=compression)
    return str(caught.value)


@pytest.mark.parametrize(
    ("compression", "options", "said"),
    [("bf16", {}, "cannot be exact"), ("bf8", {"equality": "close"}, "must be one of bf16, fp16")],
)
def test_what_rules_compression_out(compression, options, said):
    assert said in run_distributed(refuse_compression, 1, compression, options)[0]


def reporting(world):
    """Report from each lane, of which some leave out a name; return the means and what they are made of."""
    task = Language(SAMPLES)
    lanes = make_lanes(world)
    model = lanes.prepare(TinyTransformer())
    found, last = [], []
    for step in lanes.steps(task.train_dataset(), collate=task.collate):
        last = []
        for batch in step:
            pair = (batch.sum(), batch.shape[0])
            with pytest.raises(TaskError, match="metrics, gathered, totals and grad_norm are known"):
                step.metrics  # noqa: B018 - it raises
            loss = task.loss(model(batch), batch)
            metrics = {"tokens": pair, **({"few": pair} if batch.shape[1] < 9 else {})}
            step.backward(Loss(loss.sum, loss.weight, metrics=metrics))
            last.append((float(pair[0]), pair[1]))
        found.append(dict(step.metrics))
    return found, last


def test_a_step_knows_what_its_losses_report():
    alone, last = run_distributed(reporting, 1)[0]
    assert alone[-1]["tokens"] == sum(value for value, _ in last) / sum(weight for _, weight in last)
    assert list(alone[0]) == ["few", "tokens"]
    for found, _ in run_distributed(reporting, 3):
        assert found == alone
