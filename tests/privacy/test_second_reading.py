"""What a second hostile reading has found, by the scenarios that showed it: what was built after the privacy review."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import dpulr
from dpulr.accounting.events import GaussianRelease
from dpulr.audit.games import linear_loss
from dpulr.errors import Interrupted, InvalidArgument, ModelRefused
from dpulr.model.people import People
from dpulr.private_scores import HeldOut
from tests.privacy.test_people import PlaceDirections
from tests.support.core import CPU, LOSS, engine, mlp, points, train
from tests.support.replaying import Replay


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


# --- terms that cancel ----------------------------------------------------------------------------------------------------------
class Difference(nn.Module):
    """One layer, called twice: its two gradients nearly cancel where the two inputs are nearly alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(x[:, 0]) - self.again(x[:, 1])


def nearly_alike(count: int, signs: Sequence[float], apart: float) -> Tensor:
    """(count, len(signs), 64): the same long vector, but for a little of its length in the last."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(1, 1, 64, generator=generator) * (1 + 0.1 * torch.rand(count, 1, 1, generator=generator))
    x = base.repeat(1, len(signs), 1)
    x[:, -1] -= apart * base[:, 0].norm(dim=1, keepdim=True) / 8
    return x


def test_calls_that_nearly_cancel_are_added_in_float64() -> None:
    """A record's calls are thousands of times as long as what it adds. In float32: 1.003 C beside 600, 1.07 C beside 50,000."""
    x, y = nearly_alike(601, (1.0, -1.0), 3e-4), torch.full((601, 1), 1e4)
    replay = Replay(dpulr.Gradient(), Difference(), TensorDataset(x[:1], y[:1]), loss_fn=linear_loss)
    both = replay.sum_over(x, y)
    for kept in (slice(1, None), slice(None, -1)):
        assert 0.9 < replay.shares(both - replay.sum_over(x[kept], y[kept]))["all"] <= 0.9961


SIGNS = (1.0, 1.0, -1.0, -1.0)


def test_records_of_a_person_that_nearly_cancel_are_added_in_float64() -> None:
    """The same for people. In float32 the rounding of 3,000 of them was some 1e-4 C, and grew with their number."""
    people = 3_001
    x = nearly_alike(people, SIGNS, 6e-4).flatten(0, 1)
    y = (1e4 * torch.tensor(SIGNS)).repeat(people).unsqueeze(1)
    owners = np.arange(len(x)) // len(SIGNS)
    torch.manual_seed(0)
    private = engine(
        nn.Sequential(nn.Linear(64, 1)),
        TensorDataset(x[:8], y[:8]),
        loss_fn=linear_loss,
        mechanism=dpulr.Gradient(),
        unit=owners[:8],
        max_per_person=len(SIGNS),
        sample_rate=0.5,
        expected_batch_size=8.0,
    )
    public, step = private.fitted.draw_public(0), private.plan.step
    assert step is not None
    bound = private.fitted.noise_std / step.release.equivalent_noise()

    def summed(rows: np.ndarray) -> Tensor:
        those = People.of(owners[rows], len(SIGNS), CPU)
        with torch.inference_mode(), private.forward.checked_mode():
            found: Tensor = private.fitted.sum_over_people((x[rows], y[rows]), those, public, PlaceDirections())
        return found

    both = summed(np.arange(len(x)))
    for own in (0, people // 2, people - 1):
        assert 0.9 < float((both - summed(np.flatnonzero(owners != own))).norm()) / bound <= 0.99601


# --- counts and sums over all records -------------------------------------------------------------------------------------------
class NearlyEqual(nn.Module):
    """Two outputs that differ by rounding alone: torch computes the last numbers of a sigmoid in another way than those before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer(x)
        return torch.cat([torch.sigmoid(own), torch.sigmoid(torch.cat([own, torch.zeros(len(x), 63)], dim=1))[:, :1]], dim=1)


def equal_records(count: int) -> TensorDataset:
    x = torch.randn(4_000, 2, generator=torch.Generator().manual_seed(1))[10:11]
    return TensorDataset(x.repeat(count, 1), torch.zeros(count).long())


def test_one_record_more_leaves_the_answers_of_the_others() -> None:
    """Of 31 equal held-out records none was right, and of 32 all were: one moved the count by 32."""
    few, many = (HeldOut(NearlyEqual(), equal_records(count)).right_answers() for count in (31, 32))
    assert many - few in (0, 1)


def test_vectors_that_depend_on_others_are_refused() -> None:
    """Their sum was released, and called certified."""
    private = engine(mlp(), points(), steps=1)
    with pytest.raises(ModelRefused, match="mixes records"):
        private.release_sum(lambda batch: batch[0][:, :1] - batch[0].mean(), bound=1.0, release=GaussianRelease(1.0, numbers=1))
    assert private.ledger.steps == 0


# --- bounds that float32 can't hold -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bound", [1e-40, 2.2e-45])
def test_a_bound_below_what_float32_holds_is_refused(bound: float) -> None:
    """A record added 1.001 and 1.56 times as much as it might."""
    for mechanism in (dpulr.Gradient, dpulr.Gaussian, dpulr.ZerothOrder):
        with pytest.raises(InvalidArgument, match="at least 1e-30"):
            mechanism(max_grad_norm=bound)
    with pytest.raises(InvalidArgument, match="layer_weights"):
        engine(mlp(), points(), mechanism=dpulr.HiddenDirection(layer_weights=(bound, bound)))
