"""A mechanism from outside of the package, registered by its public calls alone: differences along a few public coordinates.

Each step draws `coordinates` of all parameters in public. A record gives the slope of its loss along each of them, by two passes.
That short vector is clipped and summed, normal noise is added, and those parameters alone get a gradient. `--mechanism
coordinate-differences` finds it once this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpulr import accounting, mechanisms

_MARGIN = 1 - 1e-5  # room for rounding below the bound


@accounting.register_release
@dataclass(frozen=True)
class CoordinateRelease(accounting.Release):
    """A sum of vectors of norm at most C, one number per coordinate, plus normal noise of deviation noise_multiplier * C."""

    kind = "coordinate-differences"

    noise_multiplier: float
    coordinates: int

    def pair(self) -> Any:
        return self._as_gaussian().pair()

    def equivalent_noise(self) -> float:
        return self.noise_multiplier

    def scaled(self, factor: float) -> CoordinateRelease:
        return replace(self, noise_multiplier=factor * self.noise_multiplier)

    def log_ratio(self, along: Any, across: Any) -> Any:
        return self._as_gaussian().log_ratio(along, across)

    def _as_gaussian(self) -> accounting.GaussianRelease:
        return accounting.GaussianRelease(self.noise_multiplier)


@mechanisms.register
@dataclass(frozen=True)
class CoordinateDifferences(mechanisms.Mechanism):
    """Settings: how many coordinates per step, how far each is moved, both ways, and the bound on a record."""

    coordinates: int = 8
    width: float = 1e-2
    max_grad_norm: float = 1.0
    name = "coordinate-differences"

    def release(self, sites: Sequence[Any], noise_multiplier: float) -> CoordinateRelease:
        return CoordinateRelease(noise_multiplier, self.coordinates)

    def passes(self, sites: Sequence[Any]) -> int:
        return 2 * self.coordinates

    def fit(self, forward: Any, plan: Any, *, memory_limit: int | None, seed: int) -> FittedCoordinates:
        return FittedCoordinates(self, forward, plan, seed)

    @classmethod
    def worst_case(cls) -> mechanisms.WorstCase:
        """One coordinate of one dimension, which is public: the attacker computes what the canary adds."""
        return mechanisms.WorstCase(cls(coordinates=1), dim=1, many_per_step=False, trials=2_000, signal_is_public=True)


class FittedCoordinates(mechanisms.FittedMechanism[Tensor]):
    def __init__(self, settings: CoordinateDifferences, forward: Any, plan: Any, seed: int) -> None:
        self.settings, self.forward, self.seed = settings, forward, seed
        self.size, self.divisor = settings.coordinates, plan.expected_batch_size
        self.noise_std = plan.noise_multiplier * settings.max_grad_norm
        self.parameters = {
            f"{site.name}.{name}" if site.name else name: parameter
            for site in forward.sites
            for name, parameter in site.parameters.items()
        }
        self.dim = sum(parameter.numel() for parameter in self.parameters.values())

    def draw_public(self, step: int) -> Tensor:
        """The numbers of some coordinates. They follow from the public seed and the number of the step."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        return torch.randint(self.dim, (self.size,), generator=generator)

    def sum_of_bounded_signals(self, batch: tuple[Any, Any], public: Tensor, directions: Any) -> Tensor:
        inputs, targets = batch
        total = torch.zeros(self.size, dtype=torch.float64)
        if len(targets) == 0:
            return total
        slopes = torch.stack([self._slopes(inputs, targets, int(coordinate)) for coordinate in public], dim=1).double()
        slopes = torch.where(slopes.isfinite(), slopes, 0)
        norms = torch.linalg.vector_norm(slopes, dim=1, keepdim=True)
        return total + (slopes * (_MARGIN * self.settings.max_grad_norm / norms).clamp(max=1)).sum(0)

    def gradients(self, values: Tensor, public: Tensor, into: list[dict[str, Tensor]]) -> None:
        flat = torch.zeros(self.dim).index_add_(0, public, (values / self.divisor).float())
        views = [views[name] for site, views in zip(self.forward.sites, into, strict=True) for name in site.parameters]
        for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))

    def _slopes(self, inputs: Any, targets: Any, coordinate: int) -> Tensor:
        """(records,): central differences of each record's loss along one coordinate."""
        width, losses = self.settings.width, []
        for way in (width, -width):
            moved = torch.zeros(self.dim)
            moved[coordinate] = way
            parts = moved.split([p.numel() for p in self.parameters.values()])
            weights = {n: p + part.view_as(p) for (n, p), part in zip(self.parameters.items(), parts, strict=True)}
            losses.append(self.losses(weights, inputs, targets))
        return (losses[0] - losses[1]) / (2 * width)

    def losses(self, weights: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        """NaN for a record whose pass raises."""
        found: Tensor = self.forward.losses_with(weights, inputs, targets)
        return found
