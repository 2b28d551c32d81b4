"""`gaussian`: forward gradient estimates, clipped record by record, plus normal noise (docs/theory.md, section 2).

Whatever the estimator, a record's vector depends on that record, the parameters and fresh randomness only; so the ordinary Gaussian
mechanism with Poisson sampling certifies it. The estimators are the paper's likelihood ratio and two of lower variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dpulr.accounting.events import GaussianRelease
from dpulr.forward.replay import Clean, Forward
from dpulr.forward.sites import Space
from dpulr.mechanisms.base import ROUNDING, Bound, Mechanism, parameter_views
from dpulr.randomness import Directions

Estimator = Literal["likelihood-ratio", "baseline", "antithetic"]


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Settings. With z standard normal at a site and L the record's loss, the estimate of dL/d(site) is the mean over `repeats` of

    likelihood-ratio  z L(+sigma z) / sigma                       the paper's, one-sided
    baseline          z (L(+sigma z) - L(0)) / sigma              the clean loss taken off
    antithetic        z (L(+sigma z) - L(-sigma z)) / (2 sigma)   both signs
    """

    repeats: int = 16
    estimator: Estimator = "antithetic"
    sigma: float = 0.1
    max_grad_norm: float = 1.0
    clipping: Literal["joint", "per-layer"] = "joint"
    layer_weights: tuple[float, ...] | None = None
    space: Space = "auto"
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
        if self.layer_weights is not None:
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
            if self.clipping == "joint":
                raise ValueError("layer_weights are for clipping='per-layer'; joint clipping has one bound for all layers.")

    def bind(self, forward: Forward, *, memory_limit: int, seed: int) -> BoundGaussian:
        return BoundGaussian(self, forward, memory_limit)


class BoundGaussian(Bound):
    def __init__(self, settings: Gaussian, forward: Forward, memory_limit: int) -> None:
        super().__init__(forward, memory_limit)
        self.settings = settings
        self.size = sum(site.rule.weight_dim for site in forward.sites)
        self.bounds = self._layer_bounds()

    def event(self, noise_multiplier: float) -> GaussianRelease:
        return GaussianRelease(noise_multiplier)

    def noise_std(self, noise_multiplier: float) -> float:
        return noise_multiplier * self.settings.max_grad_norm

    def gradients(self, release: Tensor) -> Tensor:
        return release

    def add(self, clean: Clean, directions: Directions, total: Tensor) -> None:
        signals = [self.estimate(clean, i, directions) for i in range(len(self.forward.sites))]
        norms = torch.stack(
            [site.norms(call, signal) for site, call, signal in zip(self.forward.sites, clean.calls, signals, strict=True)]
        )
        scales = self.clip_factors(norms)
        views = parameter_views(self.forward.sites, total)
        for site, call, signal, scale, view in zip(self.forward.sites, clean.calls, signals, scales, views, strict=True):
            site.add_gradient(call, signal, scale, view)

    def estimate(self, clean: Clean, index: int, directions: Directions) -> Tensor:
        """(records, dim): the estimated gradient of each record's loss with respect to the site's space."""
        site, call, settings = self.forward.sites[index], clean.calls[index], self.settings
        signs = 2 if settings.estimator == "antithetic" else 1
        signal = torch.zeros(clean.records, site.dim, device=self.device, dtype=self.dtype)
        for repeats in self.repeat_chunks(site, clean.records, settings.repeats, signs):
            z = directions.normal(repeats, clean.records, site.dim)
            if settings.estimator == "antithetic":
                losses = self.forward.losses(clean, index, site.perturbed_pair(call, settings.sigma * z))
                slope = (losses[:repeats] - losses[repeats:]) / (2 * settings.sigma)
            else:
                slope = self.forward.losses(clean, index, site.perturbed(call, settings.sigma * z)) / settings.sigma
                if settings.estimator == "baseline":
                    slope = slope - clean.losses / settings.sigma
            slope = torch.where(torch.isfinite(slope), slope, 0)
            signal += torch.einsum("rb,rbd->bd", slope, z)
        return signal / settings.repeats

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
        return (settings.max_grad_norm * weights / weights.norm()).to(self.device, self.dtype)
