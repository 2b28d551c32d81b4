"""Mechanisms with a bug planted in them. The audit is worth something only if it refutes each: they are its own tests.

Each bug changes one thing in what trains, and leaves the claim as it was (or, once, changes the claim alone). They are planted
where anybody may plug in something of their own: a mechanism, a source of randomness, a claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpulr.audit.games import BatchGame, Game, RowsGame, linear_loss
from dpulr.audit.one_step import play
from dpulr.audit.verdict import Verdict
from dpulr.mechanisms import Gaussian, HiddenDirection
from dpulr.mechanisms.base import FittedMechanism
from dpulr.randomness import RandomSource


@dataclass(frozen=True)
class Bug:
    """`game` plants it, given a seed."""

    name: str
    what: str
    game: Callable[[int | None], Game]
    trials: int

    def audit(self, *, seed: int | None = None, trials: int | None = None, **options: Any) -> Verdict:
        trials = self.trials if trials is None else trials
        return replace(play(self.game(seed), canary=self.name, trials=trials, **options), settings={"bug": self.what})


# --- randomness -----------------------------------------------------------------------------------------------------------
class ChangedGenerator(np.random.Generator):
    """A generator whose normal numbers go through `change` first."""

    def __init__(self, inner: np.random.Generator, change: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(inner.bit_generator)
        self.change = change

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return self.change(super().standard_normal(size, dtype, out))


class HalvedNoise(RandomSource):
    def numpy(self, purpose: str) -> np.random.Generator:
        rng = super().numpy(purpose)
        return ChangedGenerator(rng, lambda numbers: numbers / 2) if purpose == "noise" else rng


class RepeatedNoise(RandomSource):
    """Every draw of noise is handed out `times` times in a row: a generator that is restored on resuming, or always seeded anew."""

    times = 10**9

    def numpy(self, purpose: str) -> np.random.Generator:
        if purpose != "noise":
            return super().numpy(purpose)
        kept: list[np.ndarray] = []
        count = 0

        def again(numbers: np.ndarray) -> np.ndarray:
            nonlocal count
            if count % self.times == 0:
                kept[:] = [numbers]
            count += 1
            return kept[0].copy()

        return ChangedGenerator(np.random.default_rng(11), again)


class NoiseTwice(RepeatedNoise):
    times = 2


# --- mechanisms -----------------------------------------------------------------------------------------------------------
class Planted(FittedMechanism):
    """A fitted mechanism, with something changed by those who derive from this."""

    def __init__(self, inner: FittedMechanism) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def size(self) -> int:
        return self.inner.size

    def draw_public(self, step: int) -> Any:
        return self.inner.draw_public(step)

    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Any:
        return self.inner.sum_of_bounded_signals(batch, public, directions)

    def privatise(self, total: Any, noise: Tensor) -> Tensor:
        return self.inner.privatise(total, noise)

    def gradients(self, release: Tensor, public: Any, into: Any) -> None:
        self.inner.gradients(release, public, into)


_WIDE = 1e3


class _NoiseForOne(Planted):
    def privatise(self, total: Any, noise: Tensor) -> Tensor:
        return super().privatise(total, noise / _WIDE)


class Unclipped(Gaussian):
    """Clips so late that nothing is clipped, with the noise that a bound of 1 would need."""

    def fit(self, forward: Any, plan: Any, **options: Any) -> FittedMechanism:
        return _NoiseForOne(Gaussian(max_grad_norm=_WIDE).fit(forward, plan, **options))


class _Doubled(Planted):
    def privatise(self, total: Any, noise: Tensor) -> Tensor:
        return super().privatise(2 * total, noise)


class WideBits(HiddenDirection):
    def fit(self, forward: Any, plan: Any, **options: Any) -> FittedMechanism:
        return _Doubled(super().fit(forward, plan, **options))


class _Standardised(Planted):
    def sum_of_bounded_signals(self, batch: Any, public: Any, directions: Any) -> Any:
        x, y = batch
        return super().sum_of_bounded_signals(((x - x.mean(0)) / (x.std(0, correction=0) + 1e-3), y), public, directions)


class Standardised(Gaussian):
    """Inputs are standardised over the batch, behind the back of the check that refuses such models: a record sees all others."""

    def fit(self, forward: Any, plan: Any, **options: Any) -> FittedMechanism:
        return _Standardised(super().fit(forward, plan, **options))


# --- games ----------------------------------------------------------------------------------------------------------------
def halved(seed: int | None) -> Game:
    return RowsGame("gaussian", dim=1, noise_multiplier=2.0, seed=seed, randomness=HalvedNoise)


def unclipped(seed: int | None) -> Game:
    return RowsGame(Unclipped(), dim=1, noise_multiplier=2.0, slope=3.0, seed=seed)


def seed_reused(seed: int | None) -> Game:
    return two_records(seed, randomness=RepeatedNoise)


def wide_bits(seed: int | None) -> Game:
    return RowsGame(WideBits(subspace=None), dim=10, noise_multiplier=1.0, seed=seed)


def resumed(seed: int | None) -> Game:
    return two_records(seed, sample_rate=0.5, steps=2, randomness=NoiseTwice)


def credited_twice(seed: int | None) -> Game:
    game = RowsGame("gaussian", dim=1, noise_multiplier=1.0, sample_rate=0.1, seed=seed)
    step = game.claim.step
    game.claim = replace(game.claim, step=replace(step, sample_rate=step.sample_rate**2))
    return game


def batch_statistics(seed: int | None, mechanism: Any = None) -> Game:
    generator = torch.Generator().manual_seed(3)
    inputs = 1 + 0.1 * torch.randn(32, 4, generator=generator)
    return BatchGame(
        mechanism or Standardised(),
        model=nn.Sequential(nn.Linear(4, 1)),
        loss_fn=linear_loss,
        records=(inputs, torch.full((32, 1), 100.0)),
        canary=(torch.full((4,), 1e3), torch.full((1,), 100.0)),
        noise_multiplier=4.0,
        seed=seed,
    )


def shuffled(seed: int | None) -> Game:
    """Half of 20 records per batch. A fixed size makes the canary push another record out, which Poisson sampling never does.

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


def two_records(seed: int | None, **options: Any) -> Game:
    """A canary with a linear loss, in one dimension, beside one record whose loss is always 0."""
    return BatchGame(
        "gaussian",
        model=nn.Sequential(nn.Linear(1, 1, bias=False)),
        loss_fn=linear_loss,
        records=(torch.ones(1, 1), torch.zeros(1, 1)),
        canary=(torch.ones(1), torch.full((1,), 1e4)),
        noise_multiplier=4.0,
        seed=seed,
        **options,
    )


_ALL = [
    Bug("noise-halved", "the noise has half the standard deviation that is charged", halved, 40_000),
    Bug("clip-forgotten", "records are not clipped", unclipped, 40_000),
    Bug("seed-reused", "the noise comes from a seed that is always the same", seed_reused, 1_000),
    Bug("bits-to-two", "b reaches from -2 to 2 in hidden-direction", wide_bits, 40_000),
    Bug("noise-repeated", "after a resume the noise of the last step comes again", resumed, 2_000),
    Bug("sampling-twice", "sampling is credited twice: q squared for q", credited_twice, 40_000),
    Bug("batch-statistics", "inputs are standardised over the batch", batch_statistics, 1_000),
    Bug("shuffled", "fixed-size shuffled batches, charged as Poisson sampling", shuffled, 5_000),
]
BUGS: dict[str, Bug] = {bug.name: bug for bug in _ALL}
