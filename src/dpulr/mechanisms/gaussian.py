"""`gaussian`: forward gradient estimates, clipped record by record, plus normal noise (docs/theory.md, section 3).

Whatever the estimator, a record's vector depends on that record, the parameters and fresh randomness only; so the ordinary Gaussian
mechanism with Poisson sampling certifies it. The estimators are the paper's likelihood ratio and two of lower variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dpulr.accounting.events import GaussianRelease
from dpulr.mechanisms.base import ROUNDING, Bound, Mechanism, check_spaces, weighted
from dpulr.mechanisms.coordinates import Coordinates
from dpulr.model.replay import Clean, Forward
from dpulr.model.sites import Space
from dpulr.randomness import Directions

Estimator = Literal["likelihood-ratio", "baseline", "antithetic"]


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Settings. With z standard normal at a site and L the record's loss, the estimate of dL/d(site) is the mean over `repeats` of

    likelihood-ratio  z L(+sigma z) / sigma                       the paper's, one-sided
    baseline          z (L(+sigma z) - L(0)) / sigma              the clean loss taken off
    antithetic        z (L(+sigma z) - L(-sigma z)) / (2 sigma)   both signs

    `subspace=m` estimates in a public random subspace of m dimensions a layer, drawn anew in each step: fewer dimensions need fewer
    repeats, and the noise has fewer coordinates too.
    """

    repeats: int = 16
    estimator: Estimator = "antithetic"
    sigma: float = 0.1
    max_grad_norm: float = 1.0
    clipping: Literal["joint", "per-layer"] = "joint"
    layer_weights: tuple[float, ...] | None = None
    space: Space = "auto"
    subspace: int | None = None
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats!r}; it must be a whole number of at least 1.")
        if self.estimator not in ("likelihood-ratio", "baseline", "antithetic"):
            raise ValueError(f"estimator is {self.estimator!r}; it must be 'likelihood-ratio', 'baseline' or 'antithetic'.")
        if self.clipping not in ("joint", "per-layer"):
            raise ValueError(f"clipping is {self.clipping!r}; it must be 'joint' or 'per-layer'.")
        for field in ("sigma", "max_grad_norm"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} is {value}; it must be a positive number.")
        check_spaces(self.space, self.subspace)
        if self.layer_weights is not None:
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
            if self.clipping == "joint":
                raise ValueError("layer_weights are for clipping='per-layer'; joint clipping has one bound for all layers.")

    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundGaussian:
        return BoundGaussian(self, forward, memory_limit=memory_limit, seed=seed)


class BoundGaussian(Bound):
    def __init__(self, settings: Gaussian, forward: Forward, *, memory_limit: int | None, seed: int) -> None:
        super().__init__(forward, memory_limit=memory_limit, seed=seed, subspace=settings.subspace)
        self.settings = settings
        self.bounds = self._layer_bounds()

    def event_at(self, noise_multiplier: float) -> GaussianRelease:
        return GaussianRelease(noise_multiplier)

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.settings.max_grad_norm

    def draws(self, records: int) -> list[int]:
        return [
            repeats * records * coordinates.dim
            for coordinates in self.coordinates
            for repeats in self._repeats(coordinates, records)
        ]

    def _repeats(self, coordinates: Coordinates, records: int) -> Iterator[int]:
        signs = 2 if self.settings.estimator == "antithetic" else 1
        return self.repeat_chunks(signs * self.row_bytes(coordinates.site), records, self.settings.repeats)

    def add(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        sites = range(len(self.forward.sites))
        signals = [self.estimate(clean, i, directions) for i in sites]
        norms = torch.stack([self.forward.sites[i].norms(clean.calls[i], signals[i]) for i in sites])
        scales = self.clip_factors(norms)
        for i in sites:
            self.coordinates[i].add(clean.calls[i], signals[i], scales[i], parts[i])

    def estimate(self, clean: Clean, index: int, directions: Directions) -> Tensor:
        """(records, dim): the estimated gradient of each record's loss with respect to the site's coordinates."""
        site, call, settings = self.forward.sites[index], clean.calls[index], self.settings
        coordinates, sigma = self.coordinates[index], settings.sigma
        signal = torch.zeros(clean.records, coordinates.dim, device=self.device, dtype=self.dtype)
        for repeats in self._repeats(coordinates, clean.records):
            z = directions.normal(repeats, clean.records, coordinates.dim)
            delta = coordinates.perturbation(z, sigma)
            if settings.estimator == "antithetic":
                losses = self.forward.losses(clean, index, site.perturbed_pair(call, delta))
                slope = (losses[:repeats] - losses[repeats:]) / (2 * sigma)
            else:
                slope = self.forward.losses(clean, index, site.perturbed(call, delta)) / sigma
                if settings.estimator == "baseline":
                    slope = slope - clean.losses / sigma
            slope = torch.where(torch.isfinite(slope), slope, 0)
            signal += weighted(slope, z)
        return signal.div_(settings.repeats)

    def clip_factors(self, norms: Tensor) -> Tensor:
        """(sites, records): what each record's gradients are multiplied by, given their norms (sites, records)."""
        if self.settings.clipping == "joint":
            norms = torch.linalg.vector_norm(norms, dim=0, keepdim=True).expand_as(norms)
        factors: Tensor = (ROUNDING * self.bounds.unsqueeze(1) / norms).clamp(max=1)
        return factors

    def _layer_bounds(self) -> Tensor:
        """C for every layer if clipped jointly; else C_l with sum C_l^2 = C^2, in proportion to the weights."""
        count, settings = len(self.forward.sites), self.settings
        if settings.clipping == "joint":
            return torch.full((count,), settings.max_grad_norm, device=self.device, dtype=self.dtype)
        weights = torch.tensor(settings.layer_weights or [1.0] * count, dtype=torch.float64)
        if len(weights) != count or not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise ValueError(f"layer_weights must be {count} positive numbers, one per layer; got {settings.layer_weights}.")
        bounds = settings.max_grad_norm * weights / weights.square().sum().sqrt()
        return bounds.to(self.device, self.dtype)
