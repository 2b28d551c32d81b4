"""A mechanism of your own: `votes`. Registered from outside, it is known to the engine by its name.

What one learns: a mechanism is two classes. The settings say what a step releases, in terms that the accountant knows. The fitted
mechanism says how a step is computed, in four stages: draw in public, sum of bounded signals, noise (inherited), gradients.

The mechanism: each step draws some public directions in the weights of each layer. Every record votes on each: +1 if its loss rises
along it, -1 if it falls. A record's votes are a vector of length sqrt(number of votes), whatever the record is: nothing to clip.
So the sum plus normal noise is the Gaussian mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.accounting import GaussianRelease
from dpulr.mechanisms import FittedMechanism, Mechanism, register


@register
@dataclass(frozen=True)
class Votes(Mechanism):
    """Settings: public directions per layer and step, and how far the weights are moved along them."""

    repeats: int = 8
    radius: float = 0.1
    space: Any = "weight"
    name: ClassVar[str] = "votes"

    def release(self, sites: Sequence[Any], noise_multiplier: float) -> GaussianRelease:
        return GaussianRelease(noise_multiplier, mechanism=self.name)

    def passes(self, sites: Sequence[Any]) -> int:
        return 1 + self.repeats * len(sites)

    def fit(self, forward: Any, plan: Any, *, memory_limit: int | None, seed: int) -> FittedVotes:
        """The memory limit is left out here; `dpulr.mechanisms.chunks` splits batches that are too large."""
        return FittedVotes(self, forward, plan, seed)


class FittedVotes(FittedMechanism[list[Tensor]]):
    def __init__(self, settings: Votes, forward: Any, plan: Any, seed: int) -> None:
        self.settings, self.forward, self.divisor = settings, forward, plan.expected_batch_size
        self.size = settings.repeats * len(forward.sites)
        self.noise_std = plan.noise_multiplier * math.sqrt(self.size)  # the noise multiplier times a record's bound
        self._public = torch.Generator().manual_seed(seed)

    def draw_public(self, step: int) -> list[Tensor]:
        """For each layer directions (repeats, dim), the same for all records."""
        return [torch.randn(self.settings.repeats, site.dim, generator=self._public) for site in self.forward.sites]

    def sum_of_bounded_signals(self, batch: tuple[Any, Any], public: list[Tensor], directions: Any) -> Tensor:
        """One sum of votes per layer and direction. A record whose pass fails, or whose loss is not a number, does not vote."""
        votes = torch.zeros(len(public), self.settings.repeats)
        for clean in self.forward.clean(*batch) if len(batch[1]) else ():  # one clean pass; one per record, where that fails
            for index, (site, z) in enumerate(zip(self.forward.sites, public, strict=True)):
                delta = self.settings.radius * site.scale * z.unsqueeze(1).expand(-1, clean.records, -1)
                losses = self.forward.losses(clean, index, site.moved(clean.calls[index], delta))
                votes[index] += (losses - clean.losses).nan_to_num(0, 0, 0).sign().sum(1)
        return votes.flatten()

    def gradients(self, values: Tensor, public: list[Tensor], into: list[dict[str, Tensor]]) -> None:
        """From noised votes to gradients: each direction, times the mean of its votes."""
        means = values.div(self.divisor * self.settings.repeats).float().split(self.settings.repeats)
        for site, z, mean, views in zip(self.forward.sites, public, means, into, strict=True):
            site.lift(mean @ z, None, views)


def main(steps: int = 100) -> tuple[dpulr.PrivacyEngine, float]:
    """Train with the mechanism; return the engine, and the accuracy on the training records."""
    torch.manual_seed(0)
    x = torch.randn(2_000, 5)
    y = (x.sum(1) > 0).long()
    model, loss = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    engine = dpulr.PrivacyEngine(
        model, optimizer, TensorDataset(x, y), loss, mechanism="votes", batch_size=200, steps=steps, target_epsilon=2.0
    )
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(engine.privacy_spent(), f"accuracy {accuracy:.3f}", sep="\n")
    return engine, accuracy


if __name__ == "__main__":
    main()
