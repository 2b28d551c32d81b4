"""`hidden-direction`: each record perturbs in a secret direction and keeps one bit (docs/theory.md, section 6).

Record i draws z uniform on a sphere, runs the model at +radius z and -radius z, and keeps b in [-1, 1]: the sign of the difference
of the two losses, or that difference clipped. Its signal is C A z b with ||A|| <= 1. That nobody knows z is credited in epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dpulr.accounting.events import HiddenDirectionRelease, HiddenSite
from dpulr.mechanisms.base import ROUNDING, Bound, Mechanism, check_spaces, weighted
from dpulr.mechanisms.layer_budget import LayerCost, balanced, mean_overlap
from dpulr.model.replay import Clean, Forward, Move
from dpulr.model.sites import Space
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
    blocks         None perturbs layer by layer; a number makes so many blocks of neighbouring layers, each with one joint direction
                   and one pass: the cost of a step then grows with the depth, not with its square
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
    blocks: int | None = None
    name: ClassVar[str] = "hidden-direction"

    def __post_init__(self) -> None:
        for field in ("repeats", "frames"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number of at least 1.")
        if self.blocks is not None and (isinstance(self.blocks, bool) or not isinstance(self.blocks, int) or self.blocks < 1):
            raise ValueError(f"blocks is {self.blocks!r}; it must be None or a whole number of at least 1.")
        if not isinstance(self.antithetic, bool):
            raise ValueError(f"antithetic is {self.antithetic!r}; it must be true or false.")
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
    """`groups` are the sites that share a direction, first to last: one each, or blocks of neighbours."""

    def __init__(self, settings: HiddenDirection, forward: Forward, *, memory_limit: int | None, seed: int) -> None:
        subspace = max(16, 4 * settings.repeats) if settings.subspace == "auto" else settings.subspace
        super().__init__(forward, memory_limit=memory_limit, seed=seed, subspace=subspace)
        self.settings = settings
        self.signs = 2 if settings.antithetic else 1
        if settings.last_layer == "exact":
            self._check_exact()
        self.groups = self._groups()
        self.exact = len(self.groups) - 1 if settings.last_layer == "exact" else None
        self.dims = [sum(self.coordinates[i].dim for i in group) for group in self.groups]
        self._bytes = [self.signs * settings.frames * max(self.row_bytes(forward.sites[i]) for i in group) for group in self.groups]
        self.hidden = range(len(forward.sites) - (self.exact is not None))
        """The sites that hide their directions."""
        self._gains_tell = all(forward.sites[i].rule.gains_tell for i in self.hidden)
        self.weights: tuple[float, ...] = ()
        self._bounds = torch.empty(0)
        self._overlaps = torch.ones(self.size, device=self.device, dtype=self.dtype)
        for g, group in enumerate(self.groups):
            for i in group:
                if i in self.hidden:
                    self._parts(self._overlaps)[i].fill_(mean_overlap(self.dims[g]))
        for g, group in enumerate(self.groups):
            if settings.frames > self.dims[g] and g != self.exact:
                raise ValueError(f"frames is {settings.frames}, but {self._label(group)} has only {self.dims[g]} dimensions.")
        if settings.layer_weights != "auto":
            self._check_weights(settings.layer_weights)

    def _groups(self) -> list[range]:
        """Blocks of nearly equal numbers of layers; an exact last layer stays alone."""
        count, exact = len(self.forward.sites), int(self.settings.last_layer == "exact")
        hidden = count - exact
        blocks = hidden if self.settings.blocks is None else self.settings.blocks
        if blocks > hidden:
            raise ValueError(f"blocks is {blocks}, but there are only {hidden} layers to share among them.")
        borders = [round(b * hidden / blocks) for b in range(blocks + 1)] if blocks else [0]
        groups = [*(range(*pair) for pair in pairwise(borders)), *[range(hidden, count)] * exact]
        for group in groups:
            if len(group) > 1:
                self._check_order(group)
        return groups

    # --- privacy ------------------------------------------------------------------------------------------------------
    def event_at(self, noise_multiplier: float) -> HiddenDirectionRelease:
        ratios = [noise_multiplier / weight for weight in self.weights_at(noise_multiplier)]
        repeats, frames = self.settings.repeats, self.settings.frames
        sites = tuple(HiddenSite(dim, ratios[g], repeats, frames) for g, dim in enumerate(self.dims) if g != self.exact)
        return HiddenDirectionRelease(sites, () if self.exact is None else (ratios[self.exact],))

    def use(self, noise_multiplier: float) -> None:
        super().use(noise_multiplier)
        self.weights = self.weights_at(noise_multiplier)
        bounds = [[ROUNDING * weight] for group, weight in zip(self.groups, self.weights, strict=True) for _ in group]
        self._bounds = torch.tensor(bounds[: len(self.hidden)], device=self.device, dtype=self.dtype)

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier

    def weights_at(self, noise_multiplier: float) -> tuple[float, ...]:
        """The bound C of each group. Public: it depends on shapes and settings only."""
        if self.settings.layer_weights != "auto":
            return tuple(float(weight) for weight in self.settings.layer_weights)
        guesses = [math.sqrt(sum(self.forward.sites[i].fan_in for i in group) / len(group)) for group in self.groups]
        costs = [
            LayerCost.exact(gradient) if g == self.exact else LayerCost.hidden(dim, self.settings.repeats, gradient)
            for g, (dim, gradient) in enumerate(zip(self.dims, guesses, strict=True))
        ]
        return balanced(costs, noise_multiplier or 1.0)

    # --- one step -----------------------------------------------------------------------------------------------------
    def add(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        if self.hidden:
            self._add_hidden(clean, directions, parts)
        if self.exact is not None:
            site, call, signal = self.forward.sites[-1], clean.calls[-1], self.differences(clean, self.groups[-1][0])
            scale = (ROUNDING * self.weights[-1] / site.norms(call, signal)).clamp(max=1)
            self.coordinates[-1].add(call, signal, scale, parts[-1])

    def _add_hidden(self, clean: Clean, directions: Directions, parts: list[Tensor]) -> None:
        gains = torch.stack([self.forward.sites[i].gains(clean.calls[i]) for i in self.hidden])
        scales = (self._bounds / gains).nan_to_num_(0, 0, 0)
        finite = self._gains_tell and math.isfinite(gains.sum().item())
        for group, estimate in zip(self.groups, self.estimates(clean, directions), strict=False):
            for i, signal in zip(group, self._shares(group, estimate), strict=True):
                self.coordinates[i].add(clean.calls[i], signal, scales[i], parts[i], finite=finite)

    def gradients(self, release: Tensor, into: list[dict[str, Tensor]]) -> None:
        """Undo the mean overlap and lift the release: C_l times the mean of gradients normalised in the subspace, plus noise.

        This only sets the scale of the learning rate; it costs nothing and leaks nothing.
        """
        super().gradients(release / self._overlaps, into)

    def _shares(self, group: range, signal: Tensor) -> tuple[Tensor, ...]:
        """What each site of a group has of a vector."""
        if len(group) == 1:
            return (signal,)
        return torch.split(signal, [self.coordinates[i].dim for i in group], dim=-1)

    def draws(self, records: int) -> list[int]:
        if self.settings.frames > 1:
            return []
        passes = self._passes(records)
        return [part * records * sum(self.dims[g] for g in groups) for groups, repeats in passes for part in repeats]

    def estimates(self, clean: Clean, directions: Directions) -> Iterator[Tensor]:
        """For each hidden group (records, dim): the mean over the repeats of z b, which has norm at most 1."""
        for groups, repeats in self._passes(clean.records):
            sums: list[Tensor] = []
            for blocks in repeats:
                z = self.draw(directions, blocks, clean.records, [self.dims[g] for g in groups])
                b = self.bit(self.difference(clean, groups, z)).div_(self.settings.repeats)
                found = [weighted(factors, draws) for factors, draws in zip(b, z, strict=True)]
                sums = [total.add_(more) for total, more in zip(sums, found, strict=True)] if sums else found
            yield from sums

    def _passes(self, records: int) -> Iterator[tuple[range, list[int]]]:
        """Hidden groups that share their passes, as many as there is room for, and how many blocks of repeats each pass has.

        Each set of groups has a program of its own: the number of records is rounded up, so that batches of about a size share it.
        """
        start, end = 0, len(self.groups) - (self.exact is not None)
        coarse = 2 ** max(0, records.bit_length() - 3)
        records = -(-records // coarse) * coarse
        while start < end:
            stop = start + 1
            while stop < end and self.replays(sum(self._bytes[start : stop + 1]), records):
                stop += 1
            blocks = self.settings.repeats // self.settings.frames
            yield range(start, stop), list(self.repeat_chunks(sum(self._bytes[start:stop]), records, blocks))
            start = stop

    def difference(self, clean: Clean, groups: range, z: list[Tensor]) -> Tensor:
        """(groups, repeats, records): how much higher the loss is under a perturbation than under its opposite, or than without."""
        losses = self.forward.all_losses(clean, [self.move(clean, g, draws) for g, draws in zip(groups, z, strict=True)])
        if not self.settings.antithetic:
            return losses - clean.losses
        repeats = losses.shape[1] // 2
        return losses[:, :repeats] - losses[:, repeats:]

    def move(self, clean: Clean, g: int, z: Tensor) -> Move:
        """The sites of a group moved along z (repeats, records, dim), and against it if both ways are compared."""
        group, length = self.groups[g], self.settings.radius * math.sqrt(self.dims[g])
        deltas = [
            self.coordinates[i].perturbation(share, length * self.forward.sites[i].scale)
            for i, share in zip(group, self._shares(group, z), strict=True)
        ]
        site, call, rest = self.forward.sites[group[0]], clean.calls[group[0]], deltas[1:]
        if not self.settings.antithetic:
            return Move(group[0], site.perturbed(call, deltas[0]), list(zip(group[1:], rest, strict=True)))
        rest = [torch.cat([delta, -delta]) for delta in rest]
        return Move(group[0], site.perturbed_pair(call, deltas[0]), list(zip(group[1:], rest, strict=True)))

    def draw(self, directions: Directions, blocks: int, records: int, dims: list[int]) -> list[Tensor]:
        """For each dimension (blocks * frames, records, dim) unit vectors, orthonormal within a block."""
        frames = self.settings.frames
        if frames == 1:
            return directions.spheres([(blocks, records, dim) for dim in dims])
        return [directions.frames(blocks, records, frames, dim).movedim(2, 1).flatten(0, 1) for dim in dims]

    def bit(self, difference: Tensor) -> Tensor:
        """b in [-1, 1]; 0 where a loss was not finite. In orthonormal frames b is -1 or 1, as Theorem 2 needs."""
        if self.settings.frames > 1:
            return torch.where(difference < 0, -1.0, 1.0).to(difference.dtype)
        kappa = self.settings.kappa
        finite = difference.nan_to_num(0, 0, 0)
        return finite.sign_() if kappa is None else finite.div_(kappa).clamp_(-1, 1)

    # --- the exact last layer -----------------------------------------------------------------------------------------
    def differences(self, clean: Clean, index: int) -> Tensor:
        """(records, dim): slopes of the loss along the coordinates of the last layer's output, by central differences."""
        site, call, coordinates = self.forward.sites[index], clean.calls[index], self.coordinates[index]
        axes = torch.eye(coordinates.dim, device=self.device, dtype=self.dtype).unsqueeze(1)
        slopes, start = [], 0
        for count in self.repeat_chunks(2 * self.row_bytes(site), clean.records, coordinates.dim):
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
        if len(weights) != len(self.groups) or not all(math.isfinite(w) and w > 0 for w in weights):
            names = ", ".join(self._label(group) for group in self.groups)
            raise ValueError(f"layer_weights must be {len(self.groups)} positive numbers, one each for {names}; got {weights}.")

    def _label(self, group: range) -> str:
        return " + ".join(self.forward.sites[i].layer.label for i in group)

    def _check_order(self, group: range) -> None:
        """All layers of a block must lie behind its first one, or they would not be moved. Tried on made-up records."""
        if self.forward.probe is None:
            return
        clean = self.forward.clean(*self.forward.probe)
        zeros = [torch.zeros(1, clean.records, self.forward.sites[i].dim, device=self.device, dtype=self.dtype) for i in group]
        perturbed = self.forward.sites[group[0]].perturbed(clean.calls[group[0]], zeros[0])
        try:
            self.forward._losses(clean, [Move(group[0], perturbed, list(zip(group[1:], zeros[1:], strict=True)))])
        except RuntimeError as error:
            raise ValueError(f"{self._label(group)} can't be one block: {error} Use other blocks, or blocks=None.") from error
