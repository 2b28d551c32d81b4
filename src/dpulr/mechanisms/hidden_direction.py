"""`hidden-direction`: each record perturbs in a secret direction and keeps one bit (docs/theory.md, section 3).

Record i draws z uniform on a sphere, runs the model at +radius z and -radius z, and keeps b in [-1, 1]: the sign of the difference
of the two losses, or that difference clipped. Its signal is C A z b with ||A|| <= 1. That nobody knows z is credited in epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dpulr.accounting.events import HiddenDirectionRelease, HiddenSite
from dpulr.forward.replay import Clean, Forward
from dpulr.forward.sites import Space
from dpulr.mechanisms.base import ROUNDING, Bound, Mechanism, parameter_views
from dpulr.randomness import Directions


@dataclass(frozen=True)
class HiddenDirection(Mechanism):
    """Settings: `repeats` directions a record, site radius `radius * sqrt(dim)`, sign (kappa=None) or clipped difference."""

    repeats: int = 1
    layer_weights: Literal["auto"] | tuple[float, ...] = "auto"
    radius: float = 0.1
    kappa: float | None = None
    space: Space = "auto"
    name: ClassVar[str] = "hidden-direction"

    def __post_init__(self) -> None:
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats!r}; it must be a whole number of at least 1.")
        if self.layer_weights != "auto":
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
        for field in ("radius", "kappa"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} is {value}; it must be a positive number.")

    def bind(self, forward: Forward, *, memory_limit: int, seed: int) -> BoundHiddenDirection:
        return BoundHiddenDirection(self, forward, memory_limit)


class BoundHiddenDirection(Bound):
    def __init__(self, settings: HiddenDirection, forward: Forward, memory_limit: int) -> None:
        super().__init__(forward, memory_limit)
        self.settings = settings
        self.size = sum(site.rule.weight_dim for site in forward.sites)
        count = len(forward.sites)
        if settings.layer_weights == "auto":
            self.weights: tuple[float, ...] = (1.0,) * count
        else:
            self.weights = tuple(float(weight) for weight in settings.layer_weights)
            if len(self.weights) != count or not all(math.isfinite(w) and w > 0 for w in self.weights):
                names = ", ".join(site.name for site in forward.sites)
                raise ValueError(
                    f"layer_weights must be {count} positive numbers, one each for {names}; got {settings.layer_weights}."
                )

    def event(self, noise_multiplier: float) -> HiddenDirectionRelease:
        return HiddenDirectionRelease(
            tuple(
                HiddenSite(dim=site.dim, noise_ratio=noise_multiplier / weight, repeats=self.settings.repeats)
                for site, weight in zip(self.forward.sites, self.weights, strict=True)
            )
        )

    def noise_std(self, noise_multiplier: float) -> float:
        return noise_multiplier

    def gradients(self, release: Tensor) -> Tensor:
        return release

    def add(self, clean: Clean, directions: Directions, total: Tensor) -> None:
        views = parameter_views(self.forward.sites, total)
        for i, (site, call, weight, view) in enumerate(zip(self.forward.sites, clean.calls, self.weights, views, strict=True)):
            signal = self.estimate(clean, i, directions)
            gains = site.gains(call)
            scale = torch.where(gains > 0, ROUNDING * weight / gains, 0)
            site.add_gradient(call, signal, scale, view)

    def estimate(self, clean: Clean, index: int, directions: Directions) -> Tensor:
        """(records, dim): the mean over the repeats of z b, which has norm at most 1."""
        site, call, settings = self.forward.sites[index], clean.calls[index], self.settings
        signal = torch.zeros(clean.records, site.dim, device=self.device, dtype=self.dtype)
        radius = settings.radius * math.sqrt(site.dim)
        for repeats in self.repeat_chunks(site, clean.records, settings.repeats, signs=2):
            z = directions.sphere(repeats, clean.records, site.dim)
            losses = self.forward.losses(clean, index, site.perturbed_pair(call, radius * z))
            difference = losses[:repeats] - losses[repeats:]
            signal += torch.einsum("rb,rbd->bd", self.bit(difference), z)
        return signal / settings.repeats

    def bit(self, difference: Tensor) -> Tensor:
        """b in [-1, 1]; 0 where a loss was not finite."""
        kappa = self.settings.kappa
        b = torch.sign(difference) if kappa is None else (difference / kappa).clamp(-1, 1)
        return torch.where(torch.isfinite(difference), b, 0)
