"""Mechanisms with a bug planted in them. The audit is worth something only if it refutes each: they are its own tests.

Each bug changes one thing in what trains, and leaves the claim as it was (or, once, changes the claim alone). They are planted
where anybody may put something of their own: a mechanism, a source of randomness, a way to read records, a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from dpulr.audit.games import BatchGame, Game, RowsGame, linear_loss, single_canary_game
from dpulr.audit.one_step import play
from dpulr.audit.verdict import Verdict
from dpulr.mechanisms import Gaussian, HiddenDirection
from dpulr.mechanisms.base import Batch
from dpulr.mechanisms.gaussian import FittedGaussian
from dpulr.mechanisms.hidden_direction import FittedHiddenDirection
from dpulr.model.forward import Forward
from dpulr.model.sites import Bases
from dpulr.plan import Plan
from dpulr.randomness import Directions, GaussianNoise, RandomSource
from dpulr.records import Records


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


# --- mechanisms -----------------------------------------------------------------------------------------------------------
class _HalvedNoise(FittedGaussian):
    def privatise(self, total: Any, noise: Tensor) -> Tensor:
        return super().privatise(total, noise / 2)


class HalvedNoise(Gaussian):
    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedGaussian:
        return _HalvedNoise(self, forward, plan, memory_limit=memory_limit, seed=seed)


class _Unclipped(FittedGaussian):
    def clip_factors(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


class Unclipped(Gaussian):
    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedGaussian:
        return _Unclipped(self, forward, plan, memory_limit=memory_limit, seed=seed)


class _WideBits(FittedHiddenDirection):
    def bit(self, difference: Tensor, units: Tensor | None) -> Tensor:
        return (difference / 0.05).nan_to_num(0).clamp(-2, 2)


class WideBits(HiddenDirection):
    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedHiddenDirection:
        return _WideBits(self, forward, plan, memory_limit=memory_limit, seed=seed)


class _Standardised(FittedGaussian):
    def sum_of_bounded_signals(self, batch: Batch, public: Bases, directions: Directions) -> Any:
        inputs, targets = batch
        if len(inputs):
            inputs = (inputs - inputs.mean(0)) / (inputs.std(0, correction=0) + 1e-3)
        return super().sum_of_bounded_signals((inputs, targets), public, directions)


class Standardised(Gaussian):
    """Batch statistics, so that a record sees all others: where the engine, which refuses such models, does not look."""

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedGaussian:
        return _Standardised(self, forward, plan, memory_limit=memory_limit, seed=seed)


# --- randomness -----------------------------------------------------------------------------------------------------------
class RepeatedNoise(RandomSource):
    """Every draw of noise is handed out `times` times in a row: a generator that is restored on resuming, or always seeded anew."""

    times = 10**9

    def noise(self, size: int) -> GaussianNoise:
        return _Repeated(size, np.random.default_rng(11), self.times)


class NoiseTwice(RepeatedNoise):
    times = 2


class _Repeated(GaussianNoise):
    def __init__(self, size: int, rng: np.random.Generator, times: int) -> None:
        super().__init__(size, rng)
        self.times, self.left, self.last = times, 0, torch.empty(0)

    def draw(self) -> Tensor:
        if self.left == 0:
            self.last, self.left = super().draw(), self.times
        self.left -= 1
        return self.last.clone()


class SharedDropout(RandomSource):
    """What a model draws by itself comes from a known seed, one record after the other: one more moves the draws of all others."""

    @contextmanager
    def model_randomness(self, device: torch.device) -> Iterator[None]:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            yield


# --- reading ----------------------------------------------------------------------------------------------------------------
class _AtOnce(Records):
    """A batch is read at once, by the data set's own way to fetch many, and joined by torch: as loaders do."""

    def read(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        fetch = getattr(self.dataset, "__getitems__", None)
        inputs, targets = default_collate(fetch(rows.tolist()) if fetch else [self.dataset[int(row)] for row in rows])
        return (inputs, targets), rows


class _Listed(Dataset[Any]):
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


class _Centred(_Listed):
    """Fetches a whole batch, and takes its mean off: a batched transform."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        mean = torch.stack([self.items[row][0] for row in rows]).mean(0)
        return [(self.items[row][0] - mean, self.items[row][1]) for row in rows]


def _read_at_once(game: BatchGame, kind: type[_Listed], items: list[Any], canary: Any) -> Game:
    for engine, own in zip(game.engines, (items, [*items, canary]), strict=True):
        engine._drawing.records = _AtOnce(kind(own), engine.forward.device)
    return game


# --- games ----------------------------------------------------------------------------------------------------------------
def halved(seed: int | None) -> Game:
    return RowsGame(HalvedNoise(), dim=1, noise_multiplier=2.0, seed=seed)


def unclipped(seed: int | None) -> Game:
    return RowsGame(Unclipped(), dim=1, noise_multiplier=2.0, slope=3.0, seed=seed)


def seed_reused(seed: int | None) -> Game:
    return single_canary_game("gaussian", noise_multiplier=4.0, randomness=RepeatedNoise, seed=seed)


def wide_bits(seed: int | None) -> Game:
    return RowsGame(WideBits(subspace=None), dim=10, noise_multiplier=1.0, seed=seed)


def resumed(seed: int | None) -> Game:
    return single_canary_game("gaussian", noise_multiplier=4.0, sample_rate=0.5, steps=2, randomness=NoiseTwice, seed=seed)


def credited_twice(seed: int | None) -> Game:
    game = RowsGame("gaussian", dim=1, noise_multiplier=1.0, sample_rate=0.1, seed=seed)
    step = game.claim.step
    game.claim = replace(game.claim, step=replace(step, sample_rate=step.sample_rate**2))
    return game


def batch_statistics(seed: int | None) -> Game:
    generator = torch.Generator().manual_seed(3)
    inputs = 1 + 0.1 * torch.randn(32, 4, generator=generator)
    return BatchGame(
        Standardised(),
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


def shared_dropout(seed: int | None) -> Game:
    """Each of 1,600 equal records adds C with probability 3/4. One more takes a larger pass, and with that other draws for all.
    With the seed their sum is known: 12 C larger."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return BatchGame(
        Gaussian(repeats=1),
        model=nn.Sequential(layer, nn.Dropout(0.5)),
        loss_fn=linear_loss,
        records=(torch.ones(1_600, 1), torch.full((1_600, 1), 1e4)),
        canary=(torch.ones(1), torch.full((1,), 1e4)),
        noise_multiplier=4.0,
        seed=seed,
        randomness=SharedDropout,
    )


def _among_equals(mechanism: Gaussian, x: Tensor, canary: Tensor, seed: int | None) -> BatchGame:
    return BatchGame(
        mechanism,
        model=nn.Sequential(nn.Linear(x.shape[1], 1)),
        loss_fn=linear_loss,
        records=(x, torch.full((len(x), 1), 100.0)),
        canary=(canary, torch.full((1,), 100.0)),
        noise_multiplier=4.0,
        seed=seed,
    )


def promoted(seed: int | None) -> Game:
    """The canary has the others' values in float64. The joined batch is float64, the model refuses it, and nobody contributes."""
    x = torch.ones(32, 1)
    items = [(row, torch.full((1,), 100.0)) for row in x]
    canary = items[0][0].double(), items[0][1]
    return _read_at_once(_among_equals(Gaussian(repeats=1), x, x[0], seed), _Listed, items, canary)


def batch_transform(seed: int | None) -> Game:
    x = 1 + 0.1 * torch.randn(32, 4, generator=torch.Generator().manual_seed(3))
    far = torch.full((4,), 1e3)
    items = [(row, torch.full((1,), 100.0)) for row in x]
    return _read_at_once(_among_equals(Gaussian(repeats=1), x, far, seed), _Centred, items, (far, items[0][1]))


_ALL = [
    Bug("noise-halved", "the noise has half the standard deviation that is charged", halved, 40_000),
    Bug("clip-forgotten", "records are not clipped", unclipped, 40_000),
    Bug("seed-reused", "the noise comes from a seed that is always the same", seed_reused, 1_000),
    Bug("bits-to-two", "b reaches from -2 to 2 in hidden-direction", wide_bits, 40_000),
    Bug("noise-repeated", "after a resume the noise of the last step comes again", resumed, 2_000),
    Bug("sampling-twice", "sampling is credited twice: q squared for q", credited_twice, 40_000),
    Bug("batch-statistics", "inputs are standardised over the batch", batch_statistics, 1_000),
    Bug("shuffled", "fixed-size shuffled batches, charged as Poisson sampling", shuffled, 5_000),
    Bug("shared-dropout", "dropout comes from a seed that is always the same", shared_dropout, 1_000),
    Bug("promoted-types", "a batch takes the widest type of its records", promoted, 1_000),
    Bug("batch-transform", "the data set changes records by the batch they are in", batch_transform, 1_000),
]
BUGS: dict[str, Bug] = {bug.name: bug for bug in _ALL}
