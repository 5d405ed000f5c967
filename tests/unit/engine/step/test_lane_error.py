"""A lane's errors: where they arose, and what to do about those of torch that a run can explain."""

import errno
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lanewise import Task
from lanewise.config import RunConfig
from lanewise.data import LaneBatch
from lanewise.engine.engine import build_engine
from lanewise.engine.step import lane_error
from lanewise.errors import TaskError, describe
from lanewise.lanes import LaneTurn
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import configure

TURN = LaneTurn(epoch=0, step=0, lane=0, positions=range(2), present=range(1), is_last=True)


class Normed(Task):
    """Nine samples: in the last step of an epoch one lane has a single sample."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(9, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean()


class TooManyShapes(Normed):
    """As if torch.compile had met more shapes than it compiles."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        raise FailOnRecompileLimitHit("Hard failure due to fail_on_recompile_limit_hit")


def run(config: RunConfig) -> None:
    for _ in build_engine(config, LocalWorld(torch.device("cpu"))).steps():
        pass


def test_a_lane_of_one_sample_names_what_batchnorm_needs():
    with pytest.raises(TaskError, match=r"torch.Size\(\[1, 4\]\). BatchNorm .* data.drop_last") as caught:
        run(configure(Normed, num_lanes=2, steps=3))
    assert "in step 3, lane 0, samples [" in describe(caught.value)


class Forces(Normed):
    """Differentiates an energy by the positions, as a task without evaluations may."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def eval_datasets(self) -> dict[str, Any]:
        return {"held_out": self.train_dataset()}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        positions = batch[0].requires_grad_()
        (forces,) = torch.autograd.grad(model(positions).sum(), positions, create_graph=model.training)
        return forces


class ForcesWithGradients(Forces):
    """Likewise, as the error of an evaluation says."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.enable_grad():
            forces = super().forward(model, batch)
        return forces if model.training else forces.detach()


def test_a_forward_that_differentiates_names_what_an_evaluation_lacks():
    """It was an error of torch alone, after all the training before the first evaluation."""
    evaluate(ForcesWithGradients)
    said = r"element 0 of tensors does not require grad.*An evaluation runs without.*torch\.enable_grad\(\)"
    with pytest.raises(TaskError, match=said) as caught:
        evaluate(Forces)
    assert "in eval dataset held_out, lane 0" in describe(caught.value)
    with pytest.raises(RuntimeError, match="not require grad") as raw:  # in training it is another mistake
        run(configure(NoGradient, num_lanes=2, steps=1))
    assert "enable_grad" not in describe(raw.value)


class NoGradient(Forces):
    """Forgets that what is differentiated must depend on the positions."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.autograd.grad(model(batch[0]).sum(), batch[0])[0]


def evaluate(task: type[Task]) -> None:
    engine = build_engine(configure(task, num_lanes=2, steps=1), LocalWorld(torch.device("cpu")))
    for _ in engine.steps():
        assert engine.evaluation is not None
        engine.evaluation.run()


def test_too_many_compiled_shapes_name_the_limit():
    with pytest.raises(TaskError, match="Pad the batches to fewer shapes"):
        run(configure(TooManyShapes, num_lanes=2, steps=1))


class TooLarge(Normed):
    """As if an accelerator had no memory left."""

    def collate(self, samples: list[Any]) -> Any:
        return {"inputs": torch.stack([sample[0] for sample in samples]), "names": ["a", "b"]}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has ...")


def test_out_of_memory_names_the_sizes_of_the_lane_and_the_remedies():
    with pytest.raises(TaskError) as caught:
        run(configure(TooLarge, num_lanes=2, steps=1))
    said = describe(caught.value)
    assert "a micro-batch of 2 samples (['inputs'] [2, 3])" in said
    assert "activation_checkpointing=auto" in said
    assert "Tried to allocate 20.00 MiB.\n" in said
    assert "in step 1, lane 0, samples [" in said
    assert "GPU 0 has" not in said


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (MemoryError(), True),  # it was an IndexError
        (MemoryError("Unable to allocate 7.28 TiB for an array"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GiB)"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),  # mmap's
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (TaskError("Leave the block out of memory.activation_checkpointing.blocks."), False),
        (TaskError("Expected more than 1 value per channel when training"), False),
        (ValueError("the cache is out of memory"), False),
        (RuntimeError("keep OutOfMemoryError out of memory.json"), False),
        (KeyError("can't allocate memory"), False),
        (KeyError("Expected more than 1 value per channel when training"), False),
        (AssertionError("FailOnRecompileLimitHit"), False),
    ],
)
def test_only_errors_of_torch_are_explained_and_not_texts_that_are_alike(error, is_known):
    batch = LaneBatch(TURN, (0, 1), {"x": torch.ones(2, 3)}, 2)
    assert lane_error.is_out_of_memory(error) == is_known
    with pytest.raises(TaskError if is_known else type(error)) as caught, lane_error.named_lane(batch):
        raise error
    assert caught.value.__notes__ == [batch.place]
    if is_known:
        assert "out of memory with a micro-batch of 2 samples" in str(caught.value)
        assert f"The error was {type(error).__name__}" in str(caught.value)
        assert lane_error.is_out_of_memory(caught.value)


def test_the_allocator_of_the_cpu_has_no_type_of_its_own():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert lane_error.is_out_of_memory(caught.value)
