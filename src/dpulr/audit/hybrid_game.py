"""The crafted canary against hidden and exact layers in one release: each game owns a row of two tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpulr.accounting.events import HiddenDirectionRelease
from dpulr.accounting.likelihood import gaussian_log_ratio, hidden_log_ratio
from dpulr.audit import attacks
from dpulr.audit.attacks import Attack
from dpulr.audit.bounds import Array
from dpulr.audit.games import ENDLESS, Game, Unmoved, engine_claim, linear_loss, released_in
from dpulr.engine import PrivacyEngine
from dpulr.mechanisms import Mechanism
from dpulr.randomness import RandomSource

_ROWS = 10_000


class TwoTables(nn.Module):
    """Two rows for each game: `hidden`, of `dim` numbers, and `exact`, of one."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.hidden, self.exact = nn.Embedding(rows, dim), nn.Embedding(rows, 1)
        for table in (self.hidden, self.exact):
            nn.init.zeros_(table.weight)

    def forward(self, row: Tensor) -> Tensor:
        return torch.cat([self.hidden(row), self.exact(row)], dim=1)


class HybridGame(Game):
    """A loss of slope 10,000 along the first axis of the hidden row, and along the exact one: both parts of a signal are as long as
    they can be, and point where the attacker looks."""

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        dim: int,
        noise_multiplier: float,
        sample_rate: float = 1.0,
        steps: int = 1,
        seed: int | None = None,
    ) -> None:
        self.dim, self.steps, self.sample_rate = dim, steps, sample_rate
        self.rows = max(1, min(_ROWS, (1 << 19) // (dim + 1)))
        target = torch.zeros(self.rows, dim + 1)
        target[:, [0, -1]] = 1e4
        model = TwoTables(2 * self.rows, dim)
        self.engine = PrivacyEngine(
            model,
            Unmoved(model),
            TensorDataset(torch.arange(self.rows), target),
            linear_loss,
            mechanism=replace(mechanism, exact=("exact",)),  # type: ignore[type-var]
            expected_batch_size=1.0,
            sample_rate=sample_rate,
            steps=ENDLESS,
            noise_multiplier=noise_multiplier,
            randomness=RandomSource(seed),
        )
        self.mechanism = self.engine.mechanism.name
        self.claim = engine_claim(self.engine, steps)
        release = self.claim.step.release
        assert isinstance(release, HiddenDirectionRelease)
        (self._hidden,), (self._exact,) = release.sites, release.gaussian

    def releases(self) -> Iterator[tuple[Array, Array]]:
        """(games, steps, dim + 1), in standard deviations of the noise."""
        while True:
            values = np.stack([released.values.cpu().numpy() for released in released_in(self.engine, self.steps)])
            first, second = np.split(values / self.engine.fitted.noise_std, [2 * self.rows * self.dim], axis=1)
            parts = [part.reshape(self.steps, 2 * self.rows, -1) for part in (first, second)]
            games = np.concatenate(parts, axis=2).swapaxes(0, 1)
            yield games[self.rows :], games[: self.rows]

    def features(self, trials: int) -> tuple[Array, Array]:
        """(games, steps, 3): along the hidden signal, across it, along the exact one."""
        found: tuple[list[Array], list[Array]] = ([], [])
        for pair in self.releases():
            for some, games in zip(found, pair, strict=True):
                across = np.linalg.norm(games[..., 1 : self.dim], axis=-1)
                some.append(np.stack([games[..., 0], across, games[..., -1]], axis=-1))
            if sum(map(len, found[0])) >= trials:
                break
        out, inside = (np.concatenate(some)[:trials] for some in found)
        return out, inside

    def signals(self) -> Array:
        """Where the parts of the canary's signal point."""
        axes = np.zeros((1, self.dim + 1))
        axes[0, [0, -1]] = 1
        return axes

    def attacks(self) -> list[Attack]:
        """The exact test: both parts' likelihood ratios, multiplied."""
        tau, noise, rate = self._hidden.noise_ratio, self._exact, self.sample_rate

        def score(features: Array) -> Array:
            along, across, exact = np.moveaxis(features, -1, 0)
            ratio = hidden_log_ratio(along * tau, across * tau, self.dim, tau) + gaussian_log_ratio(exact * noise, noise)
            sampled = ratio if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + ratio)
            total: Array = sampled.sum(axis=1)
            return total

        return [attacks.fixed("likelihood ratio", score)]
