"""A data set that notes what is read of it, and the check that nothing more was read than an item's shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.support.core import engine


class Watched(Dataset[Any]):
    """40 records of 6 numbers with one of 3 labels. Notes which rows are read."""

    def __init__(self, labels: int = 3) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(40, 6)
        self.targets = torch.arange(40) % labels
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.reads.append(row)
        return self.x[row], self.targets[row]


def refused(kind: type[Exception], message: str, model: nn.Module | None = None, data: Any = None, **settings: Any) -> None:
    """The engine refuses to be made, by this kind of error, and has read no more than one item, for its shape."""
    model, data = nn.Sequential(nn.Linear(6, 3)) if model is None else model, Watched() if data is None else data
    with pytest.raises(kind, match=message):
        engine(model, data, **{"batch_size": 8, **settings})
    assert set(getattr(data, "reads", [])) <= {0}
