"""`zeroth-order`: differences of losses along public directions, clipped and noised (docs/theory.md, section 3).

Each step draws `repeats` directions in the space of all parameters, from public randomness, the same for the whole batch. A record
gives one slope per direction. That short vector is all that is private: it is clipped, summed and noised, and the update is put
together from the directions afterwards. Epsilon is that of the Gaussian mechanism, whatever the number of directions. DPZero, DP-ZO
and DP-ZOSO are of this kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dpulr import validate
from dpulr.accounting.events import GaussianRelease
from dpulr.mechanisms.base import Batch, FittedMechanism, Gradients, Mechanism, WorstCase
from dpulr.mechanisms.chunks import Chunks
from dpulr.model.forward import Forward
from dpulr.model.sites import Site
from dpulr.plan import Plan
from dpulr.randomness import Directions

Seeds = list[int]
_WITH_MARGIN = 1 - 1e-3
"""The rounding of all losses is divided by the radius: a bound is met with more room than elsewhere."""
_LEAST_RADIUS = 5e-4
"""Rounding of losses is divided by twice the radius: at this one it moves the sum of 400 records by about 0.001 of the bound."""


@dataclass(frozen=True)
class ZerothOrder(Mechanism):
    """Settings.

    repeats        public directions per step
    radius         how far each parameter is moved, as a standard deviation; both ways
    max_grad_norm  the bound on a record's vector of slopes, one per direction
    directions     "normal", or "sphere" of radius sqrt(number of parameters)

    The update keeps the length of a gradient: it is the sum of slope times direction over sqrt(repeats * parameters), where the
    unbiased estimate would be longer by sqrt(parameters / repeats). That is a public factor of the learning rate.
    """

    repeats: int = 16
    radius: float = 1e-3
    max_grad_norm: float = 1.0
    directions: Literal["normal", "sphere"] = "normal"
    name: ClassVar[str] = "zeroth-order"
    takes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.whole_number("repeats", self.repeats)
        validate.at_least("radius", self.radius, _LEAST_RADIUS)
        validate.positive("max_grad_norm", self.max_grad_norm)
        validate.one_of("directions", self.directions, ("normal", "sphere"))

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> GaussianRelease:
        return GaussianRelease(noise_multiplier, mechanism=self.name, numbers=self.repeats)

    def passes(self, sites: Sequence[Site]) -> int:
        return 2 * self.repeats

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedZerothOrder:
        return FittedZerothOrder(self, forward, plan, memory_limit=memory_limit, seed=seed)

    @classmethod
    def worst_case(cls) -> WorstCase:
        """One direction and one dimension; directions are public, so the attacker computes what the canary adds."""
        return WorstCase(cls(repeats=1), dim=1, many_per_step=False, trials=10_000, signal_is_public=True)


class FittedZerothOrder(FittedMechanism[Seeds]):
    """The release has one number per direction, not one per parameter."""

    def __init__(self, settings: ZerothOrder, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        self.settings, self.forward = settings, forward
        self.size, self.divisor = settings.repeats, plan.expected_batch_size
        self.noise_std = plan.noise_multiplier * settings.max_grad_norm
        self.parameters = {
            f"{site.name}.{name}" if site.name else name: parameter
            for site in forward.sites
            for name, parameter in site.parameters.items()
        }
        self.dim = sum(parameter.numel() for parameter in self.parameters.values())
        self.chunks = Chunks(forward, forward.sites, self.dim, memory_limit)
        self._public = torch.Generator().manual_seed(seed)

    def draw_public(self, step: int) -> Seeds:
        """A seed per direction."""
        seeds: Seeds = torch.randint(2**63 - 1, (self.size,), generator=self._public).tolist()
        return seeds

    def sum_of_bounded_signals(self, batch: Batch, public: Seeds, directions: Directions) -> Tensor:
        """(repeats,): the sum of the records' clipped slopes. Nothing is drawn in secret."""
        total = torch.zeros(self.size, device=self.forward.device, dtype=torch.float64)
        for chunk in self.chunks.records(batch):
            slopes = torch.stack([self.slopes(*chunk, self.direction(seed)) for seed in public], dim=1)
            total += self.forward.weighed(self.clipped(slopes).t(), chunk[1]).sum(1)
        return total

    def gradients(self, values: Tensor, public: Seeds, into: Gradients) -> None:
        views = [views[name] for site, views in zip(self.forward.sites, into, strict=True) for name in site.parameters]
        for view in views:
            view.zero_()
        scale = 1 / math.sqrt(self.size * self.dim)
        for seed, slope in zip(public, values.div(self.divisor).tolist(), strict=True):
            for view, z in zip(views, self.direction(seed).values(), strict=True):
                view.add_(z, alpha=slope * scale)

    def direction(self, seed: int) -> dict[str, Tensor]:
        """A public direction for every parameter, made again from its seed rather than kept."""
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(self.dim, generator=generator, dtype=self.forward.dtype).to(self.forward.device)
        if self.settings.directions == "sphere":
            z *= math.sqrt(self.dim) / torch.linalg.vector_norm(z.double()).item()
        parts = torch.split(z, [parameter.numel() for parameter in self.parameters.values()])
        return {name: part.view_as(p) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def slopes(self, inputs: Any, targets: Any, z: dict[str, Tensor]) -> Tensor:
        """(records,): central differences of each record's loss along z."""
        radius = self.settings.radius
        plus, minus = (
            self.forward.losses_with(
                {name: torch.add(p, z[name], alpha=way) for name, p in self.parameters.items()}, inputs, targets
            )
            for way in (radius, -radius)
        )
        return (plus - minus) / (2 * radius)

    def clipped(self, slopes: Tensor) -> Tensor:
        """(records, repeats) slopes, each record scaled to the bound. What is not finite becomes zero."""
        slopes = torch.where(torch.isfinite(slopes), slopes, 0).double()
        norms = torch.linalg.vector_norm(slopes, dim=1, keepdim=True)
        scale: Tensor = (_WITH_MARGIN * self.settings.max_grad_norm / norms).clamp(max=1)
        return slopes * scale
