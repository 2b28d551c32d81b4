"""What a second hostile reading has found, by the scenarios that showed it: what was built after the privacy review."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import dpulr
from dpulr.errors import Interrupted
from tests.support.core import LOSS, engine, mlp, points, train


# --- what is raised for a record, and is no Exception -----------------------------------------------------------------------
class PanicException(BaseException):
    """As libraries written in Rust raise: it does not derive from Exception."""


class Odd(Dataset[Any]):
    """Reading record 17 raises."""

    def __init__(self, problem: BaseException) -> None:
        self.problem = problem

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        if row == 17:
            raise self.problem
        return torch.full((6,), float(row)), row % 3


class Indices(list[int]):
    def __init__(self, problem: BaseException) -> None:
        super().__init__(range(40))
        self.problem = problem

    def __getitem__(self, row: Any) -> Any:
        if row == 17:
            raise self.problem
        return super().__getitem__(row)


def picky(problem: BaseException) -> Callable[[np.ndarray], np.ndarray]:
    def box(x: np.ndarray) -> np.ndarray:
        if (x == 100).any():
            raise problem
        return x

    return box


class Inside(nn.Module):
    def __init__(self, problem: BaseException) -> None:
        super().__init__()
        self.box = picky(problem)

    def forward(self, x: Tensor) -> Tensor:
        self.box(x.numpy())
        return x


def with_one_at_100() -> TensorDataset:
    x, y = points().tensors
    x[17] = 100
    return TensorDataset(x, y)


def loss_that_raises(problem: BaseException) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        picky(problem)(50.0 * targets.numpy())
        return LOSS(output, targets)

    return loss


PLACES: dict[str, Callable[[BaseException], dict[str, Any]]] = {
    "a data set": lambda problem: {"data": Odd(problem)},
    "a subset": lambda problem: {"data": Subset(Odd(OSError()), Indices(problem))},
    "a model": lambda problem: {"model": nn.Sequential(Inside(problem), *mlp()), "data": with_one_at_100()},
    "a box": lambda problem: {"model": nn.Sequential(dpulr.BlackBox(picky(problem), (6,)), *mlp()), "data": with_one_at_100()},
    "a loss": lambda problem: {"loss_fn": loss_that_raises(problem)},
    "labels of people": lambda problem: {"unit": Indices(problem), "max_per_person": 1},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_panic_is_forgotten_as_any_error_is(place: str, recwarn: Any) -> None:
    """It was raised from the step, and named the record."""
    made = {"model": mlp(), "data": points(), **PLACES[place](PanicException("patient 17"))}
    private = engine(made.pop("model"), made.pop("data"), sample_rate=1.0, expected_batch_size=40.0, steps=2, **made)
    assert train(private) == 2
    assert private.guarantee == "certified"
    assert not recwarn


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(3), Interrupted("interrupted.")])
@pytest.mark.parametrize("place", ["a data set", "a box"])
def test_what_ends_the_program_passes(place: str, problem: BaseException) -> None:
    """The second Ctrl-C of a run, too, which is an Exception: it was taken for an error of a record."""
    made = {"model": mlp(), "data": points(), **PLACES[place](problem)}
    private = engine(made.pop("model"), made.pop("data"), sample_rate=1.0, expected_batch_size=40.0, steps=2, **made)
    with pytest.raises(type(problem)):
        train(private)
