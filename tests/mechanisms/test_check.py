"""A mechanism from outside is tried: one record more may move its sum by no more than its release states."""

from __future__ import annotations

import math
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr import accounting
from dpulr.mechanisms import FittedMechanism, Gaussian, Gradient, HiddenDirection, Mechanism, ZerothOrder
from dpulr.mechanisms.check import bound_of, check_mechanism, is_foreign
from dpulr.mechanisms.gradient import FittedGradient
from dpulr.model.prepare import prepare
from dpulr.plan import Request
from tests.support.core import CPU, LOSS, all_kinds, mlp
from tests.support.own_mechanism import CoordinateDifferences, FittedCoordinates

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))


def reason(mechanism: Mechanism, model: nn.Module | None = None, noise: float = 2.0, per_person: int = 1) -> str | None:
    forward = prepare(mlp() if model is None else model, LOSS, EXAMPLE, CPU, space=mechanism.space)
    unit = "record" if per_person == 1 else "person"
    request = Request(records=100, batch_size=10, steps=1, noise_multiplier=noise, unit=unit, per_person=per_person)
    plan = mechanism.plan(request, forward.sites)
    return check_mechanism(mechanism.fit(forward, plan, memory_limit=None, seed=0), forward, plan)


# --- right ones -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "mechanism",
    [
        CoordinateDifferences(max_grad_norm=0.1),
        Gaussian(repeats=2, subspace=2, clipping="per-layer"),
        HiddenDirection(last_layer="exact", repeats=2),
        ZerothOrder(repeats=3),
        *(
            pytest.param(mechanism, marks=pytest.mark.slow)
            for mechanism in (
                CoordinateDifferences(),
                Gaussian(repeats=2),
                HiddenDirection(),
                HiddenDirection(kappa=1.0, antithetic=True, groups=1),
            )
        ),
    ],
    ids=repr,
)
def test_a_right_mechanism_passes(mechanism: Mechanism) -> None:
    assert reason(mechanism) is None


def test_the_example_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dpulr.mechanisms.known"], "_REGISTERED", {})  # what it registers is forgotten
    votes = runpy.run_path(str(EXAMPLES / "own_mechanism.py"))["Votes"]()
    assert is_foreign(votes)
    assert reason(votes) is None


@pytest.mark.parametrize(
    "mechanism",
    [HiddenDirection(), *(pytest.param(own, marks=pytest.mark.slow) for own in (Gaussian(repeats=2), ZerothOrder(repeats=2)))],
    ids=repr,
)
def test_randomness_of_the_model_is_no_reason(mechanism: Mechanism) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3))
    assert reason(mechanism, model) is None


def test_all_layer_kinds_pass() -> None:
    assert reason(HiddenDirection(), all_kinds()) is None


def test_what_has_no_noise_is_not_tried() -> None:
    assert reason(CoordinateDifferences(), noise=0.0) is None


def test_mechanisms_of_the_package_are_told_from_those_of_others() -> None:
    assert [is_foreign(m) for m in (CoordinateDifferences(), Gaussian(), HiddenDirection())] == [True, False, False]


# --- wrong ones -----------------------------------------------------------------------------------------------------------
class Loud(FittedCoordinates):
    """Counts each record four times."""

    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Tensor:
        return 4 * super().sum_of_bounded_signals(batch, public, directions)


class Quiet(FittedCoordinates):
    """Says noise of twice the size that it adds."""

    def privatise(self, total: Any, noise: Tensor) -> Tensor:
        return super().privatise(total, noise / 2)


class Mean(FittedCoordinates):
    """Divides by the size of the batch: one record more changes what all others add."""

    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Tensor:
        return 10 * super().sum_of_bounded_signals(batch, public, directions) / max(1, len(batch[1]))


class Spreads(FittedCoordinates):
    """A record that is not finite makes everything so."""

    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Tensor:
        total = super().sum_of_bounded_signals(batch, public, directions)
        return total + 0 * batch[0].sum()


class Unclipped(FittedCoordinates):
    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Tensor:
        slopes = torch.stack([self._slopes(*batch, int(coordinate)) for coordinate in public], dim=1)
        return slopes.double().nan_to_num(0, 0, 0).sum(0)


class Raises(FittedCoordinates):
    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Tensor:
        if not bool(torch.isfinite(batch[0]).all()):
            raise ValueError("not finite")
        return super().sum_of_bounded_signals(batch, public, directions)


class Short(FittedCoordinates):
    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Tensor:
        return super().sum_of_bounded_signals(batch, public, directions)[1:]


class Unstated(FittedCoordinates):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noise_std = math.nan


@dataclass(frozen=True)
class As(CoordinateDifferences):
    """The same settings, computed in another way."""

    fitted: type[FittedMechanism[Any]] = FittedCoordinates

    def fit(self, forward: Any, plan: Any, *, memory_limit: int | None, seed: int) -> Any:
        return self.fitted(self, forward, plan, seed)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (As(fitted=Loud), "moves the sum by .*, but its release allows 1"),
        (As(fitted=Quiet), "its privatise does not add noise"),
        (As(fitted=Mean), "moves the sum by .*, but its release allows 1"),
        (As(fitted=Spreads), "all values nan.* moves the sum by nan"),
        (As(fitted=Unclipped), "moves the sum by .*, but its release allows 1"),
        (As(fitted=Raises), "raises ValueError: not finite"),
        (As(fitted=Short), r"its sum over 22 records has shape \(7,\), not \(8,\)"),
        (As(fitted=Unstated), "its noise_std is nan"),
    ],
    ids=["loud", "quiet", "mean", "spreads", "unclipped", "raises", "short", "unstated"],
)
def test_a_wrong_mechanism_is_told_why(mechanism: Mechanism, message: str) -> None:
    found = reason(mechanism)
    assert found is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found)


class EachRecord(FittedGradient):
    """Bounds each record of a person, not all of them together."""

    def sum_over_people(self, batch: Any, people: Any, public: Any, directions: Any) -> Tensor:
        return self.sum_of_bounded_signals(batch, public, directions)


class BoundsRecords(Gradient):
    def fit(self, forward: Any, plan: Any, *, memory_limit: int | None, seed: int) -> EachRecord:
        return EachRecord(self, forward, plan, memory_limit=memory_limit, seed=seed)


@pytest.mark.slow
def test_people_are_tried_as_people() -> None:
    """A person with three records may move the sum no further than one record may."""
    for mechanism in (Gradient(), HiddenDirection(per_person=3, repeats=1), ZerothOrder(repeats=2)):
        assert reason(mechanism, per_person=3) is None
    assert reason(BoundsRecords()) is None
    found = reason(BoundsRecords(), per_person=3)
    assert found is not None
    assert "a person with 3 synthetic records" in found
    assert "but its release allows 1" in found


# --- bounds of releases ---------------------------------------------------------------------------------------------------
@accounting.register_release
@dataclass(frozen=True)
class Silent(accounting.Release):
    """Says nothing about a bound."""

    kind = "silent-for-tests"
    sigma: float

    def pair(self) -> Any:
        return accounting.GaussianRelease(self.sigma).pair()

    def scaled(self, factor: float) -> Silent:
        return replace(self, sigma=self.sigma * factor)


class Speaking(Silent):
    kind = "speaking-for-tests"

    def bound(self, noise_std: float) -> float:
        return noise_std / self.sigma


def test_bounds_follow_from_releases() -> None:
    assert bound_of(dpulr.accounting.GaussianRelease(4.0), 2.0) == 0.5
    sites = (dpulr.accounting.HiddenSite(5, 2.0), dpulr.accounting.HiddenSite(3, 1.0))
    assert bound_of(dpulr.accounting.HiddenDirectionRelease(sites, (0.5,)), 1.0) == pytest.approx(math.sqrt(0.25 + 1 + 4))
    assert bound_of(Speaking(4.0), 2.0) == 0.5
    assert bound_of(Silent(4.0), 2.0) is None


def test_a_release_without_a_bound_is_a_reason() -> None:
    @dataclass(frozen=True)
    class Quietly(CoordinateDifferences):
        def release(self, sites: Any, noise_multiplier: float) -> Any:
            return Silent(noise_multiplier)

    found = reason(Quietly())
    assert found is not None
    assert "its release (Silent) does not say how far one record may move the sum" in found
