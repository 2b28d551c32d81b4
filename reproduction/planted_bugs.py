"""Mechanisms with a bug planted in them. The audit is worth something only if it refutes each: they are its own tests.

Each bug changes one thing in the code that trains, and leaves the claim as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from dpulr.audit.games import BatchGame, Game, RowsGame, linear_loss
from dpulr.audit.one_step import lone, play
from dpulr.audit.verdict import Verdict
from dpulr.engine import PrivacyEngine
from dpulr.mechanisms import Gaussian, HiddenDirection
from dpulr.mechanisms.gaussian import BoundGaussian
from dpulr.mechanisms.hidden_direction import BoundHiddenDirection
from dpulr.model.replay import Forward
from dpulr.randomness import GaussianNoise


@dataclass(frozen=True)
class Bug:
    """`game` plants it, given a seed."""

    name: str
    what: str
    game: Callable[[int | None], Game]
    trials: int

    def audit(self, *, seed: int | None = None, trials: int | None = None, **options: Any) -> Verdict:
        return replace(
            play(self.game(seed), canary=self.name, trials=self.trials if trials is None else trials, **options),
            settings={"bug": self.what},
        )


# --- noise ------------------------------------------------------------------------------------------------------------
class _HalvedNoise(BoundGaussian):
    @property
    def noise_std(self) -> float:
        return super().noise_std / 2


class HalvedNoise(Gaussian):
    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundGaussian:
        return _HalvedNoise(self, forward, memory_limit=memory_limit, seed=seed)


class RepeatedNoise(GaussianNoise):
    """Every draw is handed out `times` times in a row: a generator that is restored on resuming, or seeded anew each time."""

    def __init__(self, size: int, rng: np.random.Generator, times: int) -> None:
        super().__init__(size, rng)
        self._times, self._left = times, 0
        self._last = torch.empty(0)

    def draw(self) -> Tensor:
        if self._left == 0:
            self._last, self._left = super().draw(), self._times
        self._left -= 1
        return self._last.clone()


def _repeat_noise(times: int) -> Callable[[PrivacyEngine], None]:
    def plant(engine: PrivacyEngine) -> None:
        engine._noise = RepeatedNoise(engine.bound.size, np.random.default_rng(11), times)

    return plant


# --- bounds -----------------------------------------------------------------------------------------------------------
class _Unclipped(BoundGaussian):
    def clip_factors(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


class Unclipped(Gaussian):
    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundGaussian:
        return _Unclipped(self, forward, memory_limit=memory_limit, seed=seed)


class _WideBits(BoundHiddenDirection):
    def bit(self, difference: Tensor) -> Tensor:
        return (difference / 0.05).clamp(-2, 2)


class WideBits(HiddenDirection):
    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundHiddenDirection:
        return _WideBits(self, forward, memory_limit=memory_limit, seed=seed)


class Standardise(nn.Module):
    """Batch statistics: a record sees all others."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


@contextmanager
def _rows_unchecked() -> Iterator[None]:
    """The engine refuses batch statistics. Here it must not."""
    with mock.patch("dpulr.model.prepare.check_rows"):
        yield


# --- games ------------------------------------------------------------------------------------------------------------
def _halved(seed: int | None) -> Game:
    return RowsGame(HalvedNoise(), dim=1, noise_multiplier=2.0, seed=seed)


def _unclipped(seed: int | None) -> Game:
    return RowsGame(Unclipped(), dim=1, noise_multiplier=2.0, slope=3.0, seed=seed)


def _seed_reused(seed: int | None) -> Game:
    return lone("gaussian", noise_multiplier=4.0, prepared=_repeat_noise(10**9), seed=seed)


def _wide(seed: int | None) -> Game:
    return RowsGame(WideBits(subspace=None), dim=10, noise_multiplier=1.0, seed=seed)


def _resumed(seed: int | None) -> Game:
    return lone("gaussian", noise_multiplier=4.0, sample_rate=0.5, steps=2, prepared=_repeat_noise(2), seed=seed)


def _credited_twice(seed: int | None) -> Game:
    game = RowsGame("gaussian", dim=1, noise_multiplier=1.0, sample_rate=0.1, seed=seed)
    step = game.claim.step
    game.claim = replace(game.claim, step=replace(step, sample_rate=step.sample_rate**2))
    return game


def _batch_statistics(seed: int | None) -> Game:
    generator = torch.Generator().manual_seed(3)
    inputs = 1 + 0.1 * torch.randn(32, 4, generator=generator)
    with _rows_unchecked():
        return BatchGame(
            "gaussian",
            model=nn.Sequential(Standardise(), nn.Linear(4, 1)),
            loss_fn=linear_loss,
            records=(inputs, torch.full((32, 1), 100.0)),
            canary=(torch.full((4,), 1e3), torch.full((1,), 100.0)),
            noise_multiplier=4.0,
            seed=seed,
        )


def _shuffled(seed: int | None) -> Game:
    """Half of 20 records a batch. A fixed size makes the canary push another record out, which Poisson sampling never does.

    Two batches of a permutation can't both have the canary: counts spread less than independent ones, and the limits are careful.
    """
    return BatchGame(
        "gaussian",
        model=nn.Sequential(nn.Linear(1, 1, bias=False)),
        loss_fn=linear_loss,
        records=(torch.ones(20, 1), torch.full((20, 1), -1e4)),
        canary=(torch.ones(1), torch.full((1,), 1e4)),
        noise_multiplier=1.0,
        sample_rate=0.5,
        batch_size=10,
        sampling="shuffle",
        seed=seed,
    )


_ALL = [
    Bug("noise-halved", "the noise has half the standard deviation that is charged", _halved, 40_000),
    Bug("clip-forgotten", "records are not clipped", _unclipped, 40_000),
    Bug("seed-reused", "the noise comes from a seed that is always the same", _seed_reused, 1_000),
    Bug("bits-to-two", "b reaches from -2 to 2 in hidden-direction", _wide, 40_000),
    Bug("noise-repeated", "after a resume the noise of the last step comes again", _resumed, 2_000),
    Bug("sampling-twice", "sampling is credited twice: q squared for q", _credited_twice, 40_000),
    Bug("batch-statistics", "inputs are standardised over the batch", _batch_statistics, 1_000),
    Bug("shuffled", "fixed-size shuffled batches, charged as Poisson sampling", _shuffled, 5_000),
]
BUGS: dict[str, Bug] = {bug.name: bug for bug in _ALL}
