"""`gaussian`: forward gradient estimates, clipped record by record, plus normal noise (docs/theory.md, section 3).

Whatever the estimator, a record's vector depends on that record, the parameters and fresh randomness only; so the ordinary Gaussian
mechanism with Poisson sampling certifies it. The estimators are the paper's likelihood ratio and two of lower variance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dpulr import validate
from dpulr.accounting.events import GaussianRelease
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import LEAST_BOUND, WITH_MARGIN, Mechanism, SitewiseMechanism, WorstCase, weighted
from dpulr.mechanisms.person_norms import per_unit
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean
from dpulr.model.signals import Signal
from dpulr.model.sites import Bases, Site, Space
from dpulr.plan import Plan
from dpulr.randomness import Directions

Estimator = Literal["likelihood-ratio", "baseline", "antithetic"]


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Settings. With z standard normal at a site and L the record's loss, the estimate of dL/d(site) is the mean over `repeats` of

    likelihood-ratio  z L(+sigma z) / sigma                       the paper's, one-sided
    baseline          z (L(+sigma z) - L(0)) / sigma              the clean loss taken off
    antithetic        z (L(+sigma z) - L(-sigma z)) / (2 sigma)   both signs

    `subspace=m` estimates in a public random subspace of m dimensions per layer, drawn anew in each step: fewer dimensions need
    fewer repeats, and the noise has fewer coordinates too.
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
    bounds_people: ClassVar[bool] = True
    takes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.whole_number("repeats", self.repeats)
        validate.one_of("estimator", self.estimator, get_args(Estimator))
        validate.one_of("clipping", self.clipping, ("joint", "per-layer"))
        validate.positive("sigma", self.sigma)
        validate.at_least("max_grad_norm", self.max_grad_norm, LEAST_BOUND)
        validate.one_of("space", self.space, get_args(Space))
        if self.subspace is not None:
            validate.whole_number("subspace", self.subspace)
        if self.layer_weights is not None:
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
            if self.clipping == "joint":
                raise InvalidArgument("layer_weights are for clipping='per-layer'; joint clipping has one bound for all layers.")

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> GaussianRelease:
        return GaussianRelease(noise_multiplier, numbers=sum(site.within(self.subspace).size for site in sites))

    def passes(self, sites: Sequence[Site]) -> int:
        return 1 + (2 if self.estimator == "antithetic" else 1) * self.repeats * len(sites)

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedGaussian:
        return FittedGaussian(self, forward, plan, memory_limit=memory_limit, seed=seed)

    @classmethod
    def worst_case(cls) -> WorstCase:
        """A clipped estimate in one dimension always has the same direction: no attack has it easier."""
        return WorstCase(cls(), dim=1)


class FittedGaussian(SitewiseMechanism):
    def __init__(self, settings: Gaussian, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        noise_std = plan.noise_multiplier * settings.max_grad_norm
        super().__init__(forward, plan, noise_std=noise_std, subspace=settings.subspace, memory_limit=memory_limit, seed=seed)
        self.settings = settings
        self.bounds = self._layer_bounds()

    def draws(self, records: int) -> list[int]:
        return [part * records * site.dim for i, site in enumerate(self.sites) for part in self._repeats(i, records)]

    def _repeats(self, index: int, records: int) -> Iterator[int]:
        signs = 2 if self.settings.estimator == "antithetic" else 1
        return self.chunks.repeats(signs * self.chunks.row_bytes[index], records, self.settings.repeats)

    def signals(self, clean: Clean, public: Bases, directions: Directions, below: Tensor) -> Iterator[Signal]:
        signals = [self.estimate(clean, i, public[i], directions) for i in range(len(self.sites))]
        own = [per_unit(*one, clean.people) for one in zip(self.sites, clean.calls, signals, strict=True)]
        signals, norms = [signal for signal, _ in own], torch.stack([norm for _, norm in own])
        scales = self.forward.weighed(self.clip_factors(norms), clean.targets)
        for i, (call, signal, scale) in enumerate(zip(clean.calls, signals, scales, strict=True)):
            yield Signal(i, self.sites[i], [call], [signal], scale, exact=clean.people is not None)

    def estimate(self, clean: Clean, index: int, basis: Tensor | None, directions: Directions) -> Tensor:
        """(records, dim): the estimated gradient of each record's loss with respect to the site's coordinates."""
        site, call, estimator, sigma = self.sites[index], clean.calls[index], self.settings.estimator, self.settings.sigma
        signal = torch.zeros(clean.records, site.dim, device=self.device, dtype=self.dtype)
        for repeats in self._repeats(index, clean.records):
            z = directions.normal(repeats, clean.records, site.dim)
            delta = site.perturbation(z, sigma, basis)
            if estimator == "antithetic":
                losses = self.forward.losses(clean, index, site.moved_both_ways(call, delta))
                slope = (losses[:repeats] - losses[repeats:]) / (2 * sigma)
            else:
                slope = self.forward.losses(clean, index, site.moved(call, delta)) / sigma
                if estimator == "baseline":
                    slope = slope - clean.losses / sigma
            signal += weighted(torch.where(torch.isfinite(slope), slope, 0), z)
        return signal.div_(self.settings.repeats)

    def clip_factors(self, norms: Tensor) -> Tensor:
        """(sites, records): what each record's gradients are multiplied by, given their norms (sites, records)."""
        if self.settings.clipping == "joint":
            norms = torch.linalg.vector_norm(norms, dim=0, keepdim=True).expand_as(norms)
        factors: Tensor = (WITH_MARGIN * self.bounds.unsqueeze(1) / norms).clamp(max=1)
        return factors

    def _layer_bounds(self) -> Tensor:
        """C for every layer if clipped jointly; else C_l with sum C_l^2 = C^2, in proportion to the weights."""
        count, settings = len(self.sites), self.settings
        if settings.clipping == "joint":
            return torch.full((count,), settings.max_grad_norm, device=self.device, dtype=self.dtype)
        weights = torch.tensor(settings.layer_weights or [1.0] * count, dtype=torch.float64)
        if len(weights) != count or not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise InvalidArgument(f"layer_weights must be {count} positive numbers, one per layer; got {settings.layer_weights}.")
        bounds = settings.max_grad_norm * weights / weights.square().sum().sqrt()
        return bounds.to(self.device, self.dtype)
