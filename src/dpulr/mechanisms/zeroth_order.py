"""`zeroth-order`: differences of losses along public directions, clipped and noised (docs/theory.md, section 3).

Each step draws `repeats` directions in the space of all parameters, from public randomness, the same for the whole batch. A record
gives one slope a direction. That short vector is all that is private: it is clipped, summed and noised, and the update is put
together from the directions afterwards. Epsilon is that of the Gaussian mechanism, whatever the number of directions. DPZero, DP-ZO
and DP-ZOSO are of this kind.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from dpulr.accounting.events import GaussianRelease
from dpulr.mechanisms.base import ROUNDING, Bound, Mechanism
from dpulr.model.batches import call_on_copy, count, rows
from dpulr.model.replay import Clean, Forward, LoneForward
from dpulr.model.sites import Space
from dpulr.randomness import Directions


@dataclass(frozen=True)
class ZerothOrder(Mechanism):
    """Settings.

    repeats        public directions a step
    radius         how far each parameter is moved, as a standard deviation; both ways
    max_grad_norm  the bound on a record's vector of slopes, one a direction
    directions     "normal", or "sphere" of radius sqrt(number of parameters)

    The update keeps the length of a gradient: it is the sum of slope times direction over sqrt(repeats * parameters), where the
    unbiased estimate would be longer by sqrt(parameters / repeats). That is a public factor of the learning rate.
    """

    repeats: int = 16
    radius: float = 1e-3
    max_grad_norm: float = 1.0
    directions: Literal["normal", "sphere"] = "normal"
    name: ClassVar[str] = "zeroth-order"
    space: ClassVar[Space] = "auto"  # type: ignore[misc]

    def __post_init__(self) -> None:
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats!r}; it must be a whole number of at least 1.")
        for field in ("radius", "max_grad_norm"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} is {value!r}; it must be a positive number.")
        if self.directions not in ("normal", "sphere"):
            raise ValueError(f"directions is {self.directions!r}; it must be 'normal' or 'sphere'.")

    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundZerothOrder:
        return BoundZerothOrder(self, forward, memory_limit=memory_limit, seed=seed)


class BoundZerothOrder(Bound):
    """The release has one number a direction, not one a parameter."""

    def __init__(self, settings: ZerothOrder, forward: Forward, *, memory_limit: int | None, seed: int) -> None:
        super().__init__(forward, memory_limit=memory_limit, seed=seed, subspace=None)
        self.settings = settings
        self.size = settings.repeats
        self.parameters = {
            f"{site.name}.{name}" if site.name else name: parameter
            for site in forward.sites
            for name, parameter in site.parameters.items()
        }
        self.dim = sum(parameter.numel() for parameter in self.parameters.values())
        self._seeds: list[int] = []

    def event_at(self, noise_multiplier: float) -> GaussianRelease:
        return GaussianRelease(noise_multiplier)

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.settings.max_grad_norm

    def total(self, inputs: Any, targets: Any, directions: Directions) -> Tensor:
        """(repeats,): the sum of the records' clipped slopes. The secret generator of directions is not used."""
        self._seeds = torch.randint(2**63 - 1, (self.size,), generator=self._public).tolist()
        total = torch.zeros(self.size, device=self.device, dtype=torch.float64)
        for chunk in self.record_chunks(inputs, targets):
            slopes = torch.stack([self.slopes(*chunk, self.direction(seed)) for seed in self._seeds], dim=1)
            total += self.clipped(slopes).sum(0)
        return total

    def add(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        raise TypeError("zeroth-order has no parts a layer")

    def direction(self, seed: int) -> dict[str, Tensor]:
        """A public direction for every parameter, made again from its seed rather than kept."""
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(self.dim, generator=generator, dtype=self.dtype).to(self.device)
        if self.settings.directions == "sphere":
            z *= math.sqrt(self.dim) / torch.linalg.vector_norm(z.double()).item()
        parts = torch.split(z, [parameter.numel() for parameter in self.parameters.values()])
        return {name: part.view_as(p) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def slopes(self, inputs: Any, targets: Any, z: dict[str, Tensor]) -> Tensor:
        """(records,): central differences of each record's loss along z."""
        radius = self.settings.radius
        plus, minus = (
            self.losses({name: torch.add(p, z[name], alpha=way) for name, p in self.parameters.items()}, inputs, targets)
            for way in (radius, -radius)
        )
        return (plus - minus) / (2 * radius)

    def losses(self, weights: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        """One loss a record with these weights. A record whose pass raises gets NaN: an error must not show which one it was."""
        if not isinstance(self.forward, LoneForward):
            try:
                return self._pass(weights, inputs, targets)
            except Exception:  # whatever a black box may raise
                self.forward.check_alive([0])
        losses = torch.full((count(targets),), math.nan, dtype=self.dtype, device=self.device)
        for i in range(len(losses)):
            with suppress(Exception):
                losses[i] = self._pass(weights, *rows((inputs, targets), i, i + 1))[0]
        return losses

    def _pass(self, weights: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        def model(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.forward.model, weights, args, kwargs)

        return self.forward.loss_fn(call_on_copy(model, inputs), targets)

    def clipped(self, slopes: Tensor) -> Tensor:
        """(records, repeats) slopes, each record scaled to the bound. What is not finite becomes zero."""
        slopes = torch.where(torch.isfinite(slopes), slopes, 0).double()
        norms = torch.linalg.vector_norm(slopes, dim=1, keepdim=True)
        scale: Tensor = (ROUNDING * self.settings.max_grad_norm / norms).clamp(max=1)
        return slopes * scale

    def gradients(self, release: Tensor, into: list[dict[str, Tensor]]) -> None:
        views = [view for site, views in zip(self.forward.sites, into, strict=True) for view in (views[n] for n in site.parameters)]
        for view in views:
            view.zero_()
        scale = 1 / math.sqrt(self.size * self.dim)
        for seed, slope in zip(self._seeds, release.tolist(), strict=True):
            for view, z in zip(views, self.direction(seed).values(), strict=True):
                view.add_(z, alpha=slope * scale)
