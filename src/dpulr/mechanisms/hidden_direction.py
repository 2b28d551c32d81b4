"""`hidden-direction`: each record perturbs in a secret direction and keeps one bit (docs/theory.md, section 6).

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
from dpulr.mechanisms.base import ROUNDING, Bound, Mechanism, check_spaces, weighted
from dpulr.mechanisms.weights import LayerCost, balanced, mean_overlap
from dpulr.randomness import Directions

_EXACT_STEP = 1e-2
_MOST_EXACT = 1_000


@dataclass(frozen=True)
class HiddenDirection(Mechanism):
    """Settings.

    repeats        directions a record and layer
    layer_weights  the bounds C_l of the layers: numbers, or "auto" (shares by the sizes of the layers: nothing private)
    radius         how far a direction reaches: a standard deviation per coordinate of a layer's output
    antithetic     True compares a direction with its opposite; False with the clean pass: half the passes a direction
    kappa          None keeps the sign of the difference of losses; a number clips difference / kappa to [-1, 1]
    frames         size of orthonormal blocks of directions (Theorem 2); it divides repeats
    last_layer     "exact" takes the last layer's gradient by differences at its few outputs, clipped and noised as a Gaussian part
    subspace       directions hide in a public subspace of m dimensions a layer ("auto": 4 a repeat, at least 16); None: in all
    """

    repeats: int = 1
    layer_weights: Literal["auto"] | tuple[float, ...] = "auto"
    radius: float = 0.1
    kappa: float | None = None
    frames: int = 1
    last_layer: Literal["hidden", "exact"] = "hidden"
    space: Space = "auto"
    subspace: int | Literal["auto"] | None = "auto"
    antithetic: bool = True
    name: ClassVar[str] = "hidden-direction"

    def __post_init__(self) -> None:
        for field in ("repeats", "frames"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number of at least 1.")
        if self.repeats % self.frames:
            raise ValueError(f"repeats is {self.repeats}; it must be a multiple of frames, which is {self.frames}.")
        if self.frames > 1 and self.kappa is not None:
            raise ValueError("orthonormal frames (frames > 1) keep signs only: use kappa=None.")
        if self.layer_weights != "auto":
            if isinstance(self.layer_weights, str):
                raise ValueError(f"layer_weights is {self.layer_weights!r}; it must be 'auto' or a number for each layer.")
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
        for field in ("radius", "kappa"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} is {value}; it must be a positive number.")
        if self.last_layer not in ("hidden", "exact"):
            raise ValueError(f"last_layer is {self.last_layer!r}; it must be 'hidden' or 'exact'.")
        check_spaces(self.space, self.subspace)

    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundHiddenDirection:
        return BoundHiddenDirection(self, forward, memory_limit=memory_limit, seed=seed)


class BoundHiddenDirection(Bound):
    def __init__(self, settings: HiddenDirection, forward: Forward, *, memory_limit: int | None, seed: int) -> None:
        subspace = max(16, 4 * settings.repeats) if settings.subspace == "auto" else settings.subspace
        super().__init__(forward, memory_limit=memory_limit, seed=seed, subspace=subspace)
        self.settings = settings
        self.signs = 2 if settings.antithetic else 1
        last = len(forward.sites) - 1
        self.exact = last if settings.last_layer == "exact" else None
        if self.exact is not None:
            self._check_exact()
        self.weights: tuple[float, ...] = ()
        for i, coordinates in enumerate(self.coordinates):
            if settings.frames > coordinates.dim and i != self.exact:
                raise ValueError(
                    f"frames is {settings.frames}, but {forward.sites[i].layer.label} has only {coordinates.dim} dimensions."
                )
        if settings.layer_weights != "auto":
            self._check_weights(settings.layer_weights)

    # --- privacy ------------------------------------------------------------------------------------------------------
    def event_at(self, noise_multiplier: float) -> HiddenDirectionRelease:
        ratios = [noise_multiplier / weight for weight in self.weights_at(noise_multiplier)]
        sites = tuple(
            HiddenSite(coordinates.dim, ratios[i], self.settings.repeats, self.settings.frames)
            for i, coordinates in enumerate(self.coordinates)
            if i != self.exact
        )
        return HiddenDirectionRelease(sites, () if self.exact is None else (ratios[self.exact],))

    def use(self, noise_multiplier: float) -> None:
        super().use(noise_multiplier)
        self.weights = self.weights_at(noise_multiplier)

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier

    def weights_at(self, noise_multiplier: float) -> tuple[float, ...]:
        """The bound C_l of each layer. Public: it depends on shapes and settings only."""
        if self.settings.layer_weights != "auto":
            return tuple(float(weight) for weight in self.settings.layer_weights)
        guesses = [math.sqrt(site.fan_in) for site in self.forward.sites]
        costs = [
            LayerCost.exact(gradient) if i == self.exact else LayerCost.hidden(coordinates.dim, self.settings.repeats, gradient)
            for i, (coordinates, gradient) in enumerate(zip(self.coordinates, guesses, strict=True))
        ]
        return balanced(costs, noise_multiplier or 1.0)

    # --- one step -----------------------------------------------------------------------------------------------------
    def add(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        for i, (site, call, weight) in enumerate(zip(self.forward.sites, clean.calls, self.weights, strict=True)):
            if i == self.exact:
                signal = self.differences(clean, i)
                scale = (ROUNDING * weight / site.norms(call, signal)).clamp(max=1)
            else:
                signal = self.estimate(clean, i, directions)
                gains = site.gains(call)
                scale = torch.where(gains > 0, ROUNDING * weight / gains, 0)
            self.coordinates[i].add(call, signal, scale, parts[i])

    def gradients(self, release: Tensor, into: list[dict[str, Tensor]]) -> None:
        """Undo the mean overlap and lift the release: C_l times the mean of gradients normalised in the subspace, plus noise.

        This only sets the scale of the learning rate; it costs nothing and leaks nothing.
        """
        for i, part in enumerate(self._parts(release)):
            if i != self.exact:
                part /= mean_overlap(self.coordinates[i].dim)
        super().gradients(release, into)

    def estimate(self, clean: Clean, index: int, directions: Directions) -> Tensor:
        """(records, dim): the mean over the repeats of z b, which has norm at most 1."""
        site, coordinates = self.forward.sites[index], self.coordinates[index]
        signal = torch.zeros(clean.records, coordinates.dim, device=self.device, dtype=self.dtype)
        radius = self.settings.radius * site.scale * math.sqrt(coordinates.dim)
        frames = self.settings.frames
        for blocks in self.repeat_chunks(site, clean.records, self.settings.repeats // frames, signs=self.signs * frames):
            z = self.draw(directions, blocks, clean.records, coordinates.dim)
            b = self.bit(self.difference(clean, index, coordinates.perturbation(z, radius)))
            signal += weighted(b, z)
        return signal.div_(self.settings.repeats)

    def difference(self, clean: Clean, index: int, delta: Tensor) -> Tensor:
        """(repeats, records): how much higher the loss is under a perturbation than under its opposite, or than without any."""
        site, call = self.forward.sites[index], clean.calls[index]
        if not self.settings.antithetic:
            return self.forward.losses(clean, index, site.perturbed(call, delta)) - clean.losses
        losses = self.forward.losses(clean, index, site.perturbed_pair(call, delta))
        return losses[: len(delta)] - losses[len(delta) :]

    def draw(self, directions: Directions, blocks: int, records: int, dim: int) -> Tensor:
        """(blocks * frames, records, dim) unit vectors, orthonormal within a block."""
        frames = self.settings.frames
        if frames == 1:
            return directions.sphere(blocks, records, dim)
        return directions.frames(blocks, records, frames, dim).movedim(2, 1).flatten(0, 1)

    def bit(self, difference: Tensor) -> Tensor:
        """b in [-1, 1]; 0 where a loss was not finite. In orthonormal frames b is -1 or 1, as Theorem 2 needs."""
        if self.settings.frames > 1:
            return torch.where(difference < 0, -1.0, 1.0).to(difference.dtype)
        kappa = self.settings.kappa
        b = torch.sign(difference) if kappa is None else (difference / kappa).clamp(-1, 1)
        return torch.where(torch.isfinite(difference), b, 0)

    # --- the exact last layer -----------------------------------------------------------------------------------------
    def differences(self, clean: Clean, index: int) -> Tensor:
        """(records, dim): slopes of the loss along the coordinates of the last layer's output, by central differences."""
        site, call, coordinates = self.forward.sites[index], clean.calls[index], self.coordinates[index]
        axes = torch.eye(coordinates.dim, device=self.device, dtype=self.dtype).unsqueeze(1)
        slopes, start = [], 0
        for count in self.repeat_chunks(site, clean.records, coordinates.dim, signs=2):
            step = coordinates.perturbation(axes[start : start + count].expand(-1, clean.records, -1), _EXACT_STEP)
            losses = self.forward.losses(clean, index, site.perturbed_pair(call, step))
            slopes.append((losses[:count] - losses[count:]) / (2 * _EXACT_STEP))
            start += count
        slope = torch.cat(slopes).t()
        return torch.where(torch.isfinite(slope), slope, 0)

    def _check_exact(self) -> None:
        site = self.forward.sites[-1]
        if site.space != "output" or site.dim > _MOST_EXACT:
            raise ValueError(
                f"last_layer='exact' needs a last layer with an output space of at most {_MOST_EXACT} numbers; {site.layer.label} "
                f"has {site.dim} in {site.space} space. Use last_layer='hidden'."
            )

    def _check_weights(self, weights: tuple[float, ...]) -> None:
        if len(weights) != len(self.coordinates) or not all(math.isfinite(w) and w > 0 for w in weights):
            names = ", ".join(site.name for site in self.forward.sites)
            raise ValueError(
                f"layer_weights must be {len(self.coordinates)} positive numbers, one each for {names}; got {weights}."
            )
