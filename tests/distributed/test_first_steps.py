"""What a forward, a loss or a backward must not do, and what the first steps find of it."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise import Loss, Task
from lanewise.errors import TaskError
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, train


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index % 3
