"""`hidden-direction`: each record perturbs in a secret direction and keeps one bit (docs/theory.md, section 6).

Record i draws z uniform on a sphere, runs the model moved by radius z, and compares its loss with that of the clean pass (or of
a pass moved the other way). It keeps b in [-1, 1]: the sign of the difference, or the difference clipped. Its signal is C A z b
with ||A|| <= 1. That nobody knows z is credited in epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dpulr import validate
from dpulr.accounting.events import HiddenDirectionRelease
from dpulr.accounting.small_signal import mean_overlap
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN, Gradients, Mechanism, SitewiseMechanism, WorstCase, weighted
from dpulr.mechanisms.exact_part import ExactPart, exact_notes, settle_exact
from dpulr.mechanisms.layout import Layout
from dpulr.mechanisms.scales import Scale, Scales, check_quantile, check_scale, trial, typical
from dpulr.mechanisms.soft_bits import joint_gains, reaches
from dpulr.model.differentiable import backward_refusal
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean, Move, Shift
from dpulr.model.sites import Bases, Site, Space
from dpulr.plan import Plan
from dpulr.randomness import Directions

_EXACT_STEP = 1e-2


@dataclass(frozen=True)
class HiddenDirection(Mechanism):
    """Settings.

    repeats        directions per record and layer
    layer_weights  the bounds C_l of the layers: numbers, or "auto" (shares by the sizes of the layers: nothing private)
    radius         how far a direction reaches: a standard deviation per coordinate of a layer's output
    antithetic     True compares a direction with its opposite; False with the clean pass: half the passes per direction
    kappa          None keeps the sign of the difference of losses; a number keeps its size up to a gradient (in a layer) of this
                   length. "auto": a length per layer, from the initial model on synthetic records; "adaptive": one that follows
                   the records, by a noisy count in the same release (docs/losses.md)
    quantile       of "auto" and "adaptive": the share of differences that are not clipped
    last_layer     "exact" takes the last layer's gradient by differences at its few outputs, clipped and noised as a Gaussian part
    exact          layers whose gradient one backward pass takes, clipped jointly and noised as a Gaussian part of the same release:
                   their names, or "auto": those whose gradient by autograd is that of the loss. "none": no backward passes
    groups         None perturbs layer by layer; a number makes so many groups of neighbouring layers, each with one joint direction
                   and one pass: the cost of a step then grows with the depth, not with its square
    subspace       directions hide in a public subspace of m dimensions per layer ("auto": 4 per repeat, at least 16); None: in all
    """

    repeats: int = 1
    layer_weights: Literal["auto"] | tuple[float, ...] = "auto"
    radius: float = 0.1
    kappa: Scale | None = None
    last_layer: Literal["hidden", "exact"] = "hidden"
    space: Space = "auto"
    subspace: int | Literal["auto"] | None = "auto"
    antithetic: bool = False
    groups: int | None = None
    exact: Literal["none", "auto"] | tuple[str, ...] = "none"
    quantile: float = 0.95
    name: ClassVar[str] = "hidden-direction"
    takes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.whole_number("repeats", self.repeats)
        validate.boolean("antithetic", self.antithetic)
        validate.one_of("last_layer", self.last_layer, ("hidden", "exact"))
        validate.one_of("space", self.space, get_args(Space))
        validate.positive("radius", self.radius)
        if self.kappa is not None:
            check_scale("kappa", self.kappa)
        check_quantile(self.quantile)
        if self.groups is not None:
            validate.whole_number("groups", self.groups)
        if self.subspace not in ("auto", None):
            validate.whole_number("subspace", self.subspace)
        if self.layer_weights != "auto":
            if isinstance(self.layer_weights, str):
                raise InvalidArgument(f"layer_weights is {self.layer_weights!r}; it must be 'auto' or a number for each layer.")
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
        self._check_exact()

    def _check_exact(self) -> None:
        if isinstance(self.exact, str):
            validate.one_of("exact", self.exact, ("none", "auto"))
        elif not isinstance(self.exact, Sequence) or not all(isinstance(name, str) for name in self.exact):
            raise InvalidArgument(f"exact is {self.exact!r}; it must be 'none', 'auto' or a list of layers' names.")
        else:
            object.__setattr__(self, "exact", tuple(dict.fromkeys(self.exact)) or "none")
        if self.exact != "none" and self.last_layer == "exact":
            raise InvalidArgument("give exact= or last_layer='exact', not both: the last layer would be exact twice.")

    @property
    def exact_names(self) -> tuple[str, ...]:
        """The layers that take exact gradients by a backward pass."""
        if self.exact == "auto":
            raise InvalidArgument("exact='auto' means something for a model only: call settled(forward) first.")
        return () if self.exact == "none" else self.exact

    @property
    def keeps_sizes(self) -> bool:
        return self.kappa is not None

    @property
    def span(self) -> float:
        """By how many radii the two passes of a difference lie apart, times the radius."""
        return self.radius * (2 if self.antithetic else 1)

    @property
    def kept_dims(self) -> int | None:
        """Dimensions of the public subspaces."""
        return max(16, 4 * self.repeats) if self.subspace == "auto" else self.subspace

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> HiddenDirectionRelease:
        return self.layout(sites).release(noise_multiplier)

    def layout(self, sites: Sequence[Site]) -> Layout:
        """Which sites share a direction, each site in its public subspace."""
        return Layout(self, sites)

    def settled(self, forward: Forward) -> HiddenDirection:
        return settle_exact(self, forward)

    def notes(self, forward: Forward) -> list[str]:
        return exact_notes(self, forward)

    def passes(self, sites: Sequence[Site]) -> int:
        layout = self.layout(sites)
        exact = 0 if layout.exact is None or self.exact != "none" else 2 * layout.dims[layout.exact]
        return 1 + (2 if self.antithetic else 1) * self.repeats * len(layout.hidden_groups) + exact

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedHiddenDirection:
        return FittedHiddenDirection(self, forward, plan, memory_limit=memory_limit, seed=seed)

    @classmethod
    def worst_case(cls) -> WorstCase:
        """The crafted canary needs no public subspace."""
        return WorstCase(cls(subspace=None))


class FittedHiddenDirection(SitewiseMechanism):
    def __init__(self, settings: HiddenDirection, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        self.settings, self.layout = settings, settings.layout(forward.sites)
        std = plan.noise_multiplier
        sites, votes = self.layout.sites, self.layout.votes
        super().__init__(forward, plan, noise_std=std, memory_limit=memory_limit, seed=seed, sites=sites, votes=votes)
        self.backward_to = self.layout.backward_to
        refusal = backward_refusal(forward, self.backward_to) if self.backward_to else None
        if refusal is not None:
            raise ModelRefused(f"exact={settings.exact_names}: {refusal}. Leave it out of exact, or say exact='auto'.")
        self.weights = self.layout.weights(plan.noise_multiplier)
        self.hidden = [i for group in self.layout.hidden_groups for i in group]  # sites that hide directions
        signs = 2 if settings.antithetic else 1
        self._group_bytes = [signs * max(self.chunks.row_bytes[i] for i in group) for group in self.layout.groups]
        self._finite_gains_suffice = all(self.sites[i].rule.finite_gain_suffices for i in self.hidden)
        self._own_repeats, self._owns_exact = settings.repeats, True
        self._bounds = self._site_bounds()
        self._overlaps = self._site_overlaps()
        for group in self.layout.hidden_groups:
            if len(group) > 1:
                self._check_order(group)
        if settings.kappa is not None:
            self.scales = self._scales(settings.kappa, plan)

    def _site_bounds(self) -> Tensor:
        """(hidden sites, 1)."""
        groups = zip(self.layout.hidden_groups, self.weights, strict=False)  # the last weight may be that of an exact layer
        bounds = [[WITH_MARGIN * weight] for group, weight in groups for _ in group]
        return torch.tensor(bounds, device=self.device, dtype=self.dtype)

    def _site_overlaps(self) -> Tensor:
        """How far a kept sign points along the gradient on average, for each number of the release; 1 where it is exact."""
        overlaps = torch.ones(self.size, device=self.device, dtype=self.dtype)
        parts = self.parts(overlaps)
        for group, dim in zip(self.layout.hidden_groups, self.layout.dims, strict=False):
            for i in group:
                parts[i].fill_(mean_overlap(dim))
        return overlaps

    def split_passes(self, rank: int, size: int) -> None:
        """A part of the repeats, whose mean over all ranks is still bounded; rank 0 has the exact layer."""
        if size > self.settings.repeats:
            raise InvalidArgument(f"parallel='passes' shares {self.settings.repeats} repeats among {size} ranks: some have none.")
        self._own_repeats, self._owns_exact = len(range(rank, self.settings.repeats, size)), rank == 0

    # --- one step -----------------------------------------------------------------------------------------------------
    def add(self, clean: Clean, public: Bases, directions: Directions, parts: list[Tensor]) -> None:
        below = torch.zeros(self._votes, clean.records, dtype=torch.bool, device=self.device)
        if self.hidden:
            self._add_hidden(clean, public, directions, parts, below)
        if self.layout.exact is not None and self._owns_exact:
            self._add_exact(clean, public, parts, below)
        if self.scales is not None and self._votes and self._owns_exact:  # one rank votes for a record, not all
            self.scales.count(below, clean.absent, parts[-1])

    def _add_exact(self, clean: Clean, public: Bases, parts: list[Tensor], below: Tensor) -> None:
        if self.backward_to:
            exact = self._exact_part(clean)
            factors = self._exact_factors(torch.linalg.vector_norm(exact.norms, dim=0), clean, below)
            exact.add(factors.expand_as(exact.norms), [parts[i] for i in self.backward_to], precise=self.precise)
            return
        index = len(self.sites) - 1
        site, call, signal = self.sites[index], clean.calls[index], self.slopes(clean, index, public[index])
        site.add(call, signal, self._exact_factors(site.norms(call, signal), clean, below), parts[index], precise=self.precise)

    def _exact_part(self, clean: Clean) -> ExactPart:
        return ExactPart([self.sites[i] for i in self.backward_to], [[i] for i in self.backward_to], clean)

    def _exact_factors(self, norms: Tensor, clean: Clean, below: Tensor) -> Tensor:
        """What exact gradients of these norms are multiplied by: clipped to the bound, or at their scale, which becomes it."""
        bound = WITH_MARGIN * self.weights[-1]
        if self.scales is None:
            return self.forward.weighed((bound / norms).clamp(max=1), clean.targets)
        if self._votes:
            below[-1] = norms <= self.scales.values[-1]
        return self.forward.weighed(bound / torch.maximum(norms, self.scales.values[-1]), clean.targets)

    def _add_hidden(self, clean: Clean, public: Bases, directions: Directions, parts: list[Tensor], below: Tensor) -> None:
        gains, groups = self._gains(clean), self.layout.hidden_groups
        reach = None if self.scales is None else reaches(self.sites, groups, gains)
        factors = (self._bounds / (gains if reach is None else joint_gains(self.sites, groups, reach))).nan_to_num_(0, 0, 0)
        scales = dict(zip(self.hidden, self.forward.weighed(factors, clean.targets), strict=True))
        finite = self._finite_gains_suffice and math.isfinite(gains.sum().item())
        estimates = self.estimates(clean, public, directions, reach, below)
        for group, estimate in zip(self.layout.hidden_groups, estimates, strict=True):
            for i, signal in zip(group, self._shares(group, estimate), strict=True):
                self.sites[i].add(clean.calls[i], signal, scales[i], parts[i], finite=finite, precise=self.precise)

    def _gains(self, clean: Clean) -> Tensor:
        """(hidden sites, records)."""
        return torch.stack([self.sites[i].gains(clean.calls[i]) for i in self.hidden])

    def lift(self, mean: Tensor, public: Bases, into: Gradients) -> None:
        """Undo the mean overlap: C_l times the mean of gradients normalised in the subspace, plus noise.

        This only sets the scale of the learning rate; it costs nothing and leaks nothing.
        """
        super().lift(mean / self._overlaps, public, into)

    def draws(self, records: int) -> list[int]:
        dims = self.layout.dims
        return [part * records * sum(dims[g] for g in groups) for groups, repeats in self._passes(records) for part in repeats]

    def estimates(
        self, clean: Clean, public: Bases, directions: Directions, reach: Tensor | None = None, below: Tensor | None = None
    ) -> Iterator[Tensor]:
        """For each hidden group (records, dim): the mean over the repeats of z b, which has norm at most 1.

        Where scales adapt, it is written to `below` (groups, records) whether a record's first difference was below them.
        """
        if self.scales is not None and reach is None:
            reach = reaches(self.sites, self.layout.hidden_groups, self._gains(clean))
        for groups, parts in self._passes(clean.records):
            units = None if reach is None else self._units(reach, groups)
            sums: list[Tensor] = []
            for repeats in parts:
                z = directions.spheres([(repeats, clean.records, self.layout.dims[g]) for g in groups])
                b = self.bit(self.difference(clean, groups, z, public), units)
                if below is not None and self._votes and not sums:
                    below[groups.start : groups.stop] = b[:, 0].abs() < 1
                b.div_(self.settings.repeats)
                found = [weighted(factors, draws) for factors, draws in zip(b, z, strict=True)]
                sums = [total.add_(more) for total, more in zip(sums, found, strict=True)] if sums else found
            yield from sums

    def _passes(self, records: int) -> Iterator[tuple[range, list[int]]]:
        """Hidden groups that share their passes, as many as there is room for, and how many repeats each pass has.

        Each set of groups has a program of its own: the number of records is rounded up, so that batches of about a size share it.
        """
        start, end = 0, len(self.layout.hidden_groups)
        coarse = 2 ** max(0, records.bit_length() - 3)
        records = -(-records // coarse) * coarse
        while start < end:
            stop = start + 1
            while stop < end and self.chunks.replays(sum(self._group_bytes[start : stop + 1]), records):
                stop += 1
            room = sum(self._group_bytes[start:stop])
            yield range(start, stop), list(self.chunks.repeats(room, records, self._own_repeats))
            start = stop

    def difference(self, clean: Clean, groups: range, z: list[Tensor], public: Bases) -> Tensor:
        """(groups, repeats, records): how much higher the loss is when moved than when not, or than when moved the other way."""
        moves = [self.move(clean, self.layout.groups[g], draws, public) for g, draws in zip(groups, z, strict=True)]
        losses = self.forward.all_losses(clean, moves)
        if not self.settings.antithetic:
            return losses - clean.losses
        repeats = losses.shape[1] // 2
        return losses[:, :repeats] - losses[:, repeats:]

    def move(self, clean: Clean, group: Sequence[int], z: Tensor, public: Bases) -> Move:
        """The sites of a group moved along z (repeats, records, dim), and against it if both ways are compared."""
        length = self.settings.radius * math.sqrt(z.shape[2])
        deltas = [
            self.sites[i].perturbation(share, length * self.sites[i].scale, public[i])
            for i, share in zip(group, self._shares(group, z), strict=True)
        ]
        first, call = self.sites[group[0]], clean.calls[group[0]]
        if self.settings.antithetic:
            moved, rest = first.moved_both_ways(call, deltas[0]), [torch.cat([delta, -delta]) for delta in deltas[1:]]
        else:
            moved, rest = first.moved(call, deltas[0]), deltas[1:]
        return Move(group[0], moved, [Shift(i, self.sites[i], delta) for i, delta in zip(group[1:], rest, strict=True)])

    def _shares(self, group: Sequence[int], signal: Tensor) -> tuple[Tensor, ...]:
        """What each site of a group has of a vector."""
        if len(group) == 1:
            return (signal,)
        return torch.split(signal, [self.sites[i].dim for i in group], dim=-1)

    def bit(self, difference: Tensor, units: Tensor | None) -> Tensor:
        """b in [-1, 1]: a sign, or the difference in these units, clipped. 0 where a loss was not finite."""
        finite = difference.nan_to_num(0, 0, 0)
        return finite.sign_() if units is None else finite.mul_(units).nan_to_num_(0, 1, -1).clamp_(-1, 1)

    # --- soft bits ----------------------------------------------------------------------------------------------------
    def _units(self, reach: Tensor, groups: range) -> Tensor:
        """(groups, 1, records): one over the difference of losses at which a record is clipped."""
        assert self.scales is not None
        own = slice(groups.start, groups.stop)
        return (reach[own] / (self.settings.span * self.scales.values[own, None])).unsqueeze(1)

    def _scales(self, kappa: Scale, plan: Plan) -> Scales:
        if not isinstance(kappa, str):
            return Scales(torch.full((len(self.layout.groups),), kappa, device=self.device, dtype=self.dtype))
        with torch.inference_mode(), self.forward.checked_mode():
            values = self._typical_lengths()
        if kappa == "auto":
            return Scales(values)
        noise = self.layout.release(plan.noise_multiplier).gaussian[-1] if plan.noise_multiplier else 1.0
        std, batch = self.noise_std or 1.0, plan.expected_batch_size
        return Scales(values, quantile=self.settings.quantile, noise_std=std, noise_multiplier=noise, batch=batch)

    def _typical_lengths(self) -> Tensor:
        """(groups,): the quantile of the gradients' lengths along a direction, on synthetic records and directions of no secret."""
        public, directions = self._bases.draw(), Directions(np.random.default_rng(0), self.device, self.dtype)
        found = []
        for clean in trial(self.forward, self.backward_to):
            lengths = list[Tensor]()
            reach = reaches(self.sites, self.layout.hidden_groups, self._gains(clean)) if self.hidden else ()
            for g, longest in enumerate(reach):
                z = [directions.sphere(1, clean.records, self.layout.dims[g])]
                lengths.append(self.difference(clean, range(g, g + 1), z, public)[0, 0].abs() * longest / self.settings.span)
            if self.layout.exact is not None:
                lengths.append(self._exact_lengths(clean, public))
            found.append(torch.stack(lengths))
        return typical(found, self.settings.quantile)

    def _exact_lengths(self, clean: Clean, public: Bases) -> Tensor:
        if self.backward_to:
            joint: Tensor = torch.linalg.vector_norm(self._exact_part(clean).norms, dim=0)
            return joint
        index = len(self.sites) - 1
        return self.sites[index].norms(clean.calls[index], self.slopes(clean, index, public[index]))

    # --- the exact last layer -----------------------------------------------------------------------------------------
    def slopes(self, clean: Clean, index: int, basis: Tensor | None) -> Tensor:
        """(records, dim): slopes of the loss along the coordinates of the last layer's output, by central differences."""
        site, call = self.sites[index], clean.calls[index]
        axes = torch.eye(site.dim, device=self.device, dtype=self.dtype).unsqueeze(1)
        slopes, start = [], 0
        for count in self.chunks.repeats(2 * self.chunks.row_bytes[index], clean.records, site.dim):
            step = site.perturbation(axes[start : start + count].expand(-1, clean.records, -1), _EXACT_STEP, basis)
            losses = self.forward.losses(clean, index, site.moved_both_ways(call, step))
            slopes.append((losses[:count] - losses[count:]) / (2 * _EXACT_STEP))
            start += count
        slope = torch.cat(slopes).t()
        return torch.where(torch.isfinite(slope), slope, 0)

    def _check_order(self, group: Sequence[int]) -> None:
        """All layers of a group must lie behind its first one, or they would not be moved. Tried on synthetic records."""
        passes = self.forward.passes
        with torch.inference_mode():
            clean = passes.clean(*self.forward.probe)
            zeros = [torch.zeros(1, clean.records, self.sites[i].full_dim, device=self.device, dtype=self.dtype) for i in group]
            moved = self.sites[group[0]].moved(clean.calls[group[0]], zeros[0])
            rest = [Shift(i, self.sites[i], delta) for i, delta in zip(group[1:], zeros[1:], strict=True)]
            try:
                passes.losses(clean, [Move(group[0], moved, rest)])
            except RuntimeError as error:
                label = self.layout.label(group)
                raise ModelRefused(f"{label} can't be one group: {error} Use other groups, or groups=None.") from error
