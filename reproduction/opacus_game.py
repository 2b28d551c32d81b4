"""DP-SGD by Opacus as a control: a mechanism of others, in the same game."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpulr.accounting.events import GaussianRelease, SampledStep
from dpulr.audit import attacks
from dpulr.audit.attacks import Attack
from dpulr.audit.bounds import Array
from dpulr.audit.claims import Claim
from dpulr.audit.games import Game
from dpulr.audit.ratios import gaussian_log_ratio


class OpacusGame(Game):
    """Rows as in `RowsGame`, through Opacus' own sampler, clipping and noise; inputs are unit vectors that pick a column."""

    mechanism = "dp-sgd (Opacus)"

    def __init__(
        self,
        *,
        dim: int,
        noise_multiplier: float,
        sample_rate: float = 1.0,
        steps: int = 1,
        seed: int | None = None,
        rows: int = 100,
    ) -> None:
        batches = round(1 / sample_rate) if 0 < sample_rate <= 1 else 0
        if not batches or abs(batches * sample_rate - 1) > 1e-9:
            raise ValueError(f"sample_rate is {sample_rate!r}; Opacus samples at 1 over a whole number (1, 0.5, 0.1, ...).")
        size = max(1, rows // batches)
        rows = size * batches  # Opacus takes its rate from the number of batches: it must divide the rows
        try:
            from opacus import PrivacyEngine
        except ImportError as problem:
            raise ValueError("opacus is not installed: pip install 'dpulr[baselines]'.") from problem
        if seed is not None:
            torch.manual_seed(seed)
        self.dim, self.steps, self.rows, self.sample_rate = dim, steps, rows, sample_rate
        self.claim = Claim(SampledStep(GaussianRelease(noise_multiplier), sample_rate), steps)
        self.noise = noise_multiplier
        target = torch.zeros(rows, dim)
        target[:, 0] = 1e4
        self.layer = nn.Linear(2 * rows, dim, bias=False)
        data = TensorDataset(torch.eye(rows, 2 * rows), target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer, self.loader = PrivacyEngine().make_private(
                module=nn.Sequential(self.layer),
                optimizer=torch.optim.SGD(self.layer.parameters(), lr=0.0),
                data_loader=DataLoader(data, batch_size=size),
                noise_multiplier=noise_multiplier,
                max_grad_norm=1.0,
                poisson_sampling=True,
            )

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.loader

    def releases(self) -> Iterator[tuple[Array, Array]]:
        batches = self._batches()
        while True:
            heard = []
            for _ in range(self.steps):
                inputs, targets = next(batches)
                self.optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    (self.model(inputs) * targets).sum(1).mean().backward()
                self.optimizer.step()
                grad = self.layer.weight.grad
                assert grad is not None
                heard.append(grad.t().double().numpy() * self.optimizer.expected_batch_size)
            games = np.stack(heard, axis=1)
            yield games[self.rows :], games[: self.rows]

    def signals(self) -> Array:
        return np.eye(1, self.dim)

    def attacks(self) -> list[Attack]:
        def ratio(along: Array, across: Array) -> Array:
            return gaussian_log_ratio(along, self.noise)

        return [attacks.likelihood_ratio(ratio, self.sample_rate), *super().attacks()[1:]]
