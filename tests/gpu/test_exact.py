"""`exact` on a GPU: processes that share one card over gloo give the bytes of a single process."""

import pytest
import torch

from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, configure, train
from tests.unit.reduce.lanes import cancelling, in_tree, reduce_lanes

pytestmark = pytest.mark.gpu
SIZES = [3, 1000, 300_000, 5]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_transformer_ends_with_the_same_bytes_and_losses(world_size):
    alone = run_distributed(train, 1, configure(Language), device="cuda:0")[0]
    for result in run_distributed(train, world_size, configure(Language), device="cuda:0"):
        assert result == alone


def reduce_on_gpu(world):
    def value(lane: int, size: int) -> torch.Tensor:
        return cancelling(lane, size).to(world.device)

    gradients = reduce_lanes(world, value, SIZES, exact=True, num_lanes=5)
    return [gradient.cpu().numpy().tobytes() for gradient in gradients]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_reducer_adds_in_the_tree(world_size):
    expected = [value.numpy().tobytes() for value in in_tree(cancelling, SIZES, 5, 5)]
    for result in run_distributed(reduce_on_gpu, world_size, device="cuda:0"):
        assert result == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs one GPU for each process")
def test_nccl_gives_the_bytes_of_one_process(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    config = Path(__file__).parents[2] / "examples" / "mnist" / "mnist.yaml"
    models = []
    for devices in (1, 2):
        run_dir = tmp_path / str(devices)
        command = [sys.executable, "-m", "lanewise", "train", str(config), "--train.epochs", "1"]
        command += ["--train.run_dir", str(run_dir), "--distributed.devices", str(devices)]
        subprocess.run(command, check=True)
        models.append((run_dir / "model.safetensors").read_bytes())
    assert models[0] == models[1]
