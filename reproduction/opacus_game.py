"""DP-SGD by Opacus as a control: a mechanism of others, in the same game."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpulr.accounting.events import GaussianRelease, SampledStep
from dpulr.audit import attacks
from dpulr.audit.attacks import Attack
from dpulr.audit.bounds import Array
from dpulr.audit.claims import Claim
from dpulr.audit.games import Game
from dpulr.errors import InvalidArgument
from reproduction.opacus import private_steps


def mean_linear_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum(1).mean()


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
            raise InvalidArgument(f"sample_rate is {sample_rate!r}; Opacus samples at 1 over a whole number (1, 0.5, 0.1, ...).")
        if seed is not None:
            torch.manual_seed(seed)
        self.size = max(1, rows // batches)  # Opacus takes its rate from the number of batches: it must divide the rows
        self.dim, self.steps, self.rows, self.sample_rate = dim, steps, self.size * batches, sample_rate
        self.claim = Claim(SampledStep(GaussianRelease(noise_multiplier), sample_rate), steps)
        target = torch.zeros(self.rows, dim)
        target[:, 0] = 1e4
        self.layer = nn.Linear(2 * self.rows, dim, bias=False)
        self.each_step = private_steps(
            nn.Sequential(self.layer),
            torch.optim.SGD(self.layer.parameters(), lr=0.0),
            TensorDataset(torch.eye(self.rows, 2 * self.rows), target),
            batch_size=self.size,
            noise_multiplier=noise_multiplier,
            loss_fn=mean_linear_loss,
            mode="hooks",
        )

    def releases(self) -> Iterator[tuple[Array, Array]]:
        while True:
            heard = []
            for _ in range(self.steps):
                next(self.each_step)
                grad = self.layer.weight.grad
                assert grad is not None
                heard.append(grad.t().double().numpy() * self.size)
            games = np.stack(heard, axis=1)
            yield games[self.rows :], games[: self.rows]

    def signals(self) -> Array:
        return np.eye(1, self.dim)

    def attacks(self) -> list[Attack]:
        def ratio(along: Array, across: Array) -> Array:
            found = self.claim.step.release.log_ratio(along, across)
            assert found is not None
            return found

        return [attacks.likelihood_ratio(ratio, self.sample_rate), *super().attacks()[1:]]
