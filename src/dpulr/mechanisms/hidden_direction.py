"""`hidden-direction`: each record perturbs in a secret direction and keeps one bit (docs/theory.md, section 6).

Record i draws z uniform on a sphere, runs the model moved by radius z, and compares its loss with that of the clean pass (or of
a pass moved the other way). It keeps b in [-1, 1]: the sign of the difference, or the difference clipped. Its signal is C A z b
with ||A|| <= 1. That nobody knows z is credited in epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dpulr import validate
from dpulr.accounting.events import HiddenDirectionRelease
from dpulr.accounting.small_signal import mean_overlap
from dpulr.auto import subspace_for
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN, Gradients, Mechanism, SitewiseMechanism, WorstCase, weighted
from dpulr.mechanisms.exact_part import ExactPart, exact_notes, settle_exact
from dpulr.mechanisms.layout import Layout
from dpulr.mechanisms.moves import USUAL_RADIUS, along, move, settle_radius, shares
from dpulr.mechanisms.person_norms import per_unit
from dpulr.mechanisms.scales import Scale, Scales, check_quantile, check_scale, trial, typical
from dpulr.mechanisms.soft_bits import joint_gains, reaches
from dpulr.model.differentiable import backward_refusal
from dpulr.model.forward import Forward
from dpulr.model.layers import Call
from dpulr.model.passes import Clean, Move
from dpulr.model.people import People
from dpulr.model.signals import Signal
from dpulr.model.sites import Bases, Site, Space, gains_of
from dpulr.plan import Plan
from dpulr.randomness import Directions

_EXACT_STEP = 1e-2


@dataclass(frozen=True)
class HiddenDirection(Mechanism):
    """Settings.

    repeats        directions per record and layer; "auto": by budget and model, when the run is planned (dpulr.auto)
    layer_weights  the bounds C_l of the layers: numbers, or "auto" (shares by the sizes of the layers: nothing private)
    radius         how far a direction reaches: a standard deviation per coordinate of a layer's output. One number, or one for each
                   layer (group) with hidden directions. "auto" looks on synthetic records which of them need a wider one, for
                   signs, spikes or other steps
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
    per_person     the most records of a person that share a direction and a bit; the engine sets it (unit=)
    """

    repeats: int | Literal["auto"] = "auto"
    layer_weights: Literal["auto"] | tuple[float, ...] = "auto"
    radius: float | tuple[float, ...] | Literal["auto"] = USUAL_RADIUS
    kappa: Scale | None = None
    last_layer: Literal["hidden", "exact"] = "hidden"
    space: Space = "auto"
    subspace: int | Literal["auto"] | None = "auto"
    antithetic: bool = False
    groups: int | None = None
    exact: Literal["none", "auto"] | tuple[str, ...] = "none"
    quantile: float = 0.95
    per_person: int = 1
    name: ClassVar[str] = "hidden-direction"
    calls_again: ClassVar[bool] = True
    takes_weights: ClassVar[bool] = True
    bounds_people: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.repeats != "auto":
            validate.whole_number("repeats", self.repeats)
        validate.whole_number("per_person", self.per_person)
        validate.boolean("antithetic", self.antithetic)
        validate.one_of("last_layer", self.last_layer, ("hidden", "exact"))
        validate.one_of("space", self.space, get_args(Space))
        if isinstance(self.radius, tuple | list):
            object.__setattr__(self, "radius", tuple(self.radius))
        if self.radius != "auto":
            for radius in self.radius if isinstance(self.radius, tuple) else (self.radius,):
                validate.positive("radius", radius)
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
    def count(self) -> int:
        """The repeats, as a number: 1 as long as no run has filled "auto" in."""
        return 1 if self.repeats == "auto" else self.repeats

    @property
    def keeps_sizes(self) -> bool:
        return self.kappa is not None

    def distances(self, groups: int) -> tuple[float, ...]:
        """The radius of each of so many groups of layers."""
        if isinstance(self.radius, str):
            raise InvalidArgument("radius='auto' means something for a model only: call settled(forward) first.")
        if not isinstance(self.radius, tuple):
            return (self.radius,) * groups
        if len(self.radius) != groups:
            raise InvalidArgument(
                f"radius must be a number, or {groups}: one for each layer that hides directions; got {self.radius}."
            )
        return self.radius

    @property
    def kept_dims(self) -> int | None:
        """Dimensions of the public subspaces."""
        if self.subspace != "auto":
            return self.subspace
        return max(4, -(-subspace_for(self.count) // self.per_person))

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> HiddenDirectionRelease:
        return self.layout(sites).release(noise_multiplier)

    def layout(self, sites: Sequence[Site]) -> Layout:
        """Which sites share a direction, each site in its public subspace."""
        return Layout(self, sites)

    def settled(self, forward: Forward) -> HiddenDirection:
        return settle_radius(settle_exact(self, forward), forward)

    def for_people(self, most: int) -> HiddenDirection:
        if most > 1 and self.kappa == "adaptive":
            raise InvalidArgument("kappa='adaptive' counts records, and a person may have several: use max_per_person=1.")
        return replace(self, per_person=most)

    def notes(self, forward: Forward) -> list[str]:
        return exact_notes(self, forward)

    def passes(self, sites: Sequence[Site]) -> int:
        layout = self.layout(sites)
        exact = 0 if layout.exact is None or self.exact != "none" else 2 * layout.sites[-1].dim
        return 1 + (2 if self.antithetic else 1) * self.count * len(layout.hidden_groups) + exact

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedHiddenDirection:
        return FittedHiddenDirection(self, forward, plan, memory_limit=memory_limit, seed=seed)

    @property
    def has_exact_part(self) -> bool:
        return self.exact != "none"

    @classmethod
    def worst_case(cls) -> WorstCase:
        """The crafted canary needs no public subspace."""
        return WorstCase(cls(repeats=1, subspace=None))


class FittedHiddenDirection(SitewiseMechanism):
    def __init__(self, settings: HiddenDirection, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        self.settings, self.layout = settings, settings.layout(forward.sites)
        std = plan.noise_multiplier
        sites, votes = self.layout.sites, self.layout.votes
        super().__init__(forward, plan, noise_std=std, memory_limit=memory_limit, seed=seed, sites=sites, votes=votes)
        self.backward_to = [i for place in self.layout.backward_to for i in forward.uses[place]]
        refusal = backward_refusal(forward, self.backward_to) if self.backward_to else None
        if refusal is not None:
            raise ModelRefused(f"exact={settings.exact_names}: {refusal}. Leave it out of exact, or say exact='auto'.")
        self.weights = self.layout.weights(plan.noise_multiplier)
        self.distances = settings.distances(len(self.layout.hidden_groups))
        self.hidden = [i for group in self.layout.hidden_groups for i in group]  # sites that hide directions
        signs = 2 if settings.antithetic else 1
        self._group_bytes = [signs * max(self.chunks.row_bytes[i] for i in group) for group in self.layout.groups]
        self._finite_gains_suffice = all(self.sites[i].rule.finite_gain_suffices for i in self.hidden)
        self._own_repeats, self._owns_exact = [settings.count] * len(self.layout.hidden_groups), True
        self._known_passes: dict[int, list[tuple[list[int], list[int]]]] = {}
        self._own_votes = torch.ones(votes, device=self.device, dtype=torch.float64)
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
        """What the release is divided by: how far a kept sign points along the gradient on average; 1 where it is exact.

        Beside exact gradients the release is multiplied by it instead: all layers have the same noise; where noise prevails, the
        best step of a layer is in proportion to its signal.
        """
        overlaps = torch.ones(self.size, device=self.device, dtype=self.dtype)
        parts = self.parts(overlaps)
        for group, dim in zip(self.layout.hidden_groups, self.layout.dims, strict=False):
            for i in group:
                parts[i].fill_(1 / mean_overlap(dim) if self.backward_to else mean_overlap(dim))
        return overlaps

    def split_passes(self, rank: int, size: int) -> None:
        """Repeats of layers are dealt out in turn, the exact part as the last. The sum over all ranks is bounded as before."""
        repeats, groups = self.settings.count, len(self.layout.hidden_groups)
        dealt = repeats * groups
        if size > dealt + (self.layout.exact is not None):
            raise InvalidArgument(
                f"parallel='passes' deals {repeats} repeats of {groups} layers to {size} ranks: some have nothing to do. Use fewer "
                "ranks, or parallel='records'."
            )
        self._own_repeats = [sum(i % size == rank for i in range(g * repeats, (g + 1) * repeats)) for g in range(groups)]
        self._owns_exact = dealt % size == rank
        self._known_passes.clear()
        voters = [g * repeats % size for g in range(groups)] + [dealt % size]  # of a record, one rank votes about each scale
        self._own_votes = torch.tensor(voters[: self._votes], device=self.device).eq(rank).double()

    # --- one step -----------------------------------------------------------------------------------------------------
    def signals(self, clean: Clean, public: Bases, directions: Directions, below: Tensor) -> Iterator[Signal]:
        if any(self._own_repeats):
            yield from self._hidden_signals(clean, public, directions, below)
        if self.layout.exact is not None and self._owns_exact:
            yield from self._exact_signals(clean, public, below)

    def _exact_signals(self, clean: Clean, public: Bases, below: Tensor) -> Iterator[Signal]:
        if self.backward_to:
            exact = self._exact_part(clean)
            factors = self._exact_factors(torch.linalg.vector_norm(exact.norms, dim=0), clean, below)
            yield from exact.signals_times(factors.unsqueeze(0), self.layout.backward_to)
            return
        index = len(self.sites) - 1
        site, call = self.sites[index], clean.calls[self.forward.uses[index][0]]
        signal, norms = per_unit(site, call, self.slopes(clean, index, public[index]), clean.people)
        factors = self._exact_factors(norms, clean, below)
        yield Signal(index, site, [call], [signal], factors, exact=clean.people is not None)

    def _exact_part(self, clean: Clean) -> ExactPart:
        places = self.layout.backward_to
        return ExactPart([self.sites[i] for i in places], [self.forward.uses[i] for i in places], clean)

    def _exact_factors(self, norms: Tensor, clean: Clean, below: Tensor) -> Tensor:
        """What exact gradients of these norms are multiplied by: clipped to the bound, or at their scale, which becomes it."""
        bound = WITH_MARGIN * self.weights[-1]
        if self.scales is None:
            return self.forward.weighed((bound / norms).clamp(max=1), clean.targets)
        if self._votes:
            below[-1] = norms <= self.scales.values[-1]
        return self.forward.weighed(bound / torch.maximum(norms, self.scales.values[-1]), clean.targets)

    def _hidden_signals(self, clean: Clean, public: Bases, directions: Directions, below: Tensor) -> Iterator[Signal]:
        calls = self.forward.calls(clean)
        gains, groups = self._gains(calls, clean.people), self.layout.hidden_groups
        reach = None if self.scales is None else reaches(self.sites, groups, gains)
        factors = (self._bounds / (gains if reach is None else joint_gains(self.sites, groups, reach))).nan_to_num_(0, 0, 0)
        clean.silence(factors)  # else a row that holds no record would get its person's bit
        scales = dict(zip(self.hidden, self.forward.weighed(factors, clean.targets), strict=True))
        finite = self._finite_gains_suffice and math.isfinite(gains.sum().item())
        estimates = self.estimates(clean, public, directions, reach, below)
        own = [groups[g] for together, _ in self._passes(clean.records) for g in together]
        for group, estimate in zip(own, estimates, strict=True):
            for i, signal in zip(group, shares(self.sites, group, estimate), strict=True):
                yield Signal(i, self.sites[i], [calls[i]], [signal], scales[i], finite=finite, exact=clean.people is not None)

    def _gains(self, calls: Sequence[Call], people: People | None) -> Tensor:
        """(hidden sites, records); a person's records have one, of all of them together."""
        gains = gains_of([self.sites[i] for i in self.hidden], [calls[i] for i in self.hidden])
        return gains if people is None else people.joint_norms(gains)

    def lift(self, mean: Tensor, public: Bases, into: Gradients) -> None:
        """Undo the mean overlap: C_l times the mean of gradients normalised in the subspace, plus noise (but see `_site_overlaps`).

        This only sets the scale of the learning rate; it costs nothing and leaks nothing.
        """
        super().lift(mean / self._overlaps, public, into)

    def draws(self, records: int) -> list[int]:
        dims = self.layout.dims
        return [part * records * sum(dims[g] for g in groups) for groups, repeats in self._passes(records) for part in repeats]

    def estimates(
        self, clean: Clean, public: Bases, directions: Directions, reach: Tensor | None = None, below: Tensor | None = None
    ) -> Iterator[Tensor]:
        """For each hidden group, in the order of `_passes` (records, dim): the mean over the repeats of z b, of norm at most 1.

        A person's records have a block each of one z, and one b: together they have norm at most 1. Where scales adapt, it is
        written to `below` (groups, records) whether a record's first difference was below them.
        """
        people, drawn = clean.people, clean.records if clean.people is None else clean.people.count
        if self.scales is not None and reach is None:
            reach = reaches(self.sites, self.layout.hidden_groups, self._gains(self.forward.calls(clean), clean.people))
        for groups, parts in self._passes(clean.records):
            units = None if reach is None else self._units(reach, groups)
            sums: list[Tensor] = []
            for repeats in parts:
                z = directions.spheres([(repeats, drawn, self.layout.dims[g]) for g in groups])
                if people is not None:
                    z = [people.shares(draws) for draws in z]
                b = self.bits(self.difference(clean, groups, z, public), units, people)
                if below is not None and self._votes and not sums:
                    below[groups] = b[:, 0].abs() < 1
                if self.settings.count > 1:
                    b.div_(self.settings.count)
                found = [weighted(factors, draws) for factors, draws in zip(b, z, strict=True)]
                sums = [total.add_(more) for total, more in zip(sums, found, strict=True)] if sums else found
            yield from sums

    def numbers(self, clean: Clean, public: Bases, directions: Directions) -> Iterator[Tensor]:
        """Differences of losses rather than their signs, which hide what is computed."""
        calls = self.forward.calls(clean)
        yield from (call.input for call in calls)
        if self.hidden:
            yield self._gains(calls, None).t()
        for groups, parts in self._passes(clean.records):
            for repeats in parts:
                dims = [self.layout.dims[g] // self.settings.per_person for g in groups]  # of people with one record
                z = directions.spheres([(repeats, clean.records, dim) for dim in dims])
                yield from (*(draws.movedim(1, 0) for draws in z), self.difference(clean, groups, z, public).movedim(2, 0))
        if self.layout.exact is not None:
            below = torch.zeros(self._votes, clean.records, dtype=torch.bool, device=self.device)
            for signal in self._exact_signals(clean, public, below):
                yield from signal.per_record()

    def _passes(self, records: int) -> list[tuple[list[int], list[int]]]:
        """Hidden groups of this rank that share their passes, as many as there is room for, and how many repeats each pass has.

        Each set of groups has a program of its own: the number of records is rounded up, so that batches of about a size share it.
        """
        coarse = 2 ** max(0, records.bit_length() - 3)
        records = -(-records // coarse) * coarse
        if records not in self._known_passes:
            self._known_passes[records] = list(self._make_passes(records))
        return self._known_passes[records]

    def _make_passes(self, records: int) -> Iterator[tuple[list[int], list[int]]]:
        for repeats in sorted(set(self._own_repeats) - {0}):
            left = [g for g, own in enumerate(self._own_repeats) if own == repeats]
            while left:
                count, room = 1, self._group_bytes[left[0]]
                while count < len(left) and self.chunks.replays(room + self._group_bytes[left[count]], records):
                    room += self._group_bytes[left[count]]
                    count += 1
                yield left[:count], list(self.chunks.repeats(room, records, repeats))
                left = left[count:]

    def difference(self, clean: Clean, groups: Sequence[int], z: list[Tensor], public: Bases) -> Tensor:
        """(groups, repeats, records): how much higher the loss is when moved than when not, or than when moved the other way."""
        moves = [self.move(clean, g, draws, public) for g, draws in zip(groups, z, strict=True)]
        losses = self.forward.all_losses(clean, moves)
        if not self.settings.antithetic:
            return losses - clean.losses
        repeats = losses.shape[1] // 2
        return losses[:, :repeats] - losses[:, repeats:]

    def move(self, clean: Clean, g: int, z: Tensor, public: Bases) -> Move:
        """The sites of group g moved along z (repeats, records, dim), and against it if both ways are compared."""
        group, radius = self.layout.groups[g], self.distances[g] * math.sqrt(self.settings.per_person)
        if len(group) == 1 and not self.settings.antithetic and len(self.forward.uses[group[0]]) == 1:  # the usual case, quicker
            site, use = self.sites[group[0]], self.forward.uses[group[0]][0]
            length = radius * math.sqrt(z.shape[2]) * site.scale
            return Move(use, site.moved_along(clean.calls[use], z, length, public[group[0]]))
        deltas = along(self.sites, group, z, radius, public)
        return move(self.forward, self.sites, clean, group, deltas, both_ways=self.settings.antithetic)

    def bits(self, difference: Tensor, units: Tensor | None, people: People | None) -> Tensor:
        """A bit for each record; with people, that of the person's mean loss."""
        if people is None:
            return self.bit(difference, units)
        own = None if units is None else units[..., people.starts]
        return people.to_rows(self.bit(people.mean(difference.nan_to_num(0, 0, 0)), own))

    def bit(self, difference: Tensor, units: Tensor | None) -> Tensor:
        """b in [-1, 1]: a sign, or the difference in these units, clipped. 0 where a loss was not finite."""
        finite = difference.nan_to_num(0, 0, 0)
        return finite.sign_() if units is None else finite.mul_(units).nan_to_num_(0, 1, -1).clamp_(-1, 1)

    # --- soft bits ----------------------------------------------------------------------------------------------------
    def _units(self, reach: Tensor, groups: list[int]) -> Tensor:
        """(groups, 1, records): one over the difference of losses at which a record is clipped."""
        assert self.scales is not None
        spans = reach.new_tensor([self._span(g) for g in groups])
        return (reach[groups] / (spans * self.scales.values[groups]).unsqueeze(1)).unsqueeze(1)

    def _span(self, g: int) -> float:
        """How far the two passes of a difference lie apart."""
        return self.distances[g] * (2 if self.settings.antithetic else 1)

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
            reach = (
                reaches(self.sites, self.layout.hidden_groups, self._gains(self.forward.calls(clean), None)) if self.hidden else ()
            )
            for g, longest in enumerate(reach):
                whole = directions.sphere(1, clean.records, self.layout.dims[g])
                z = [whole[..., : self.layout.dims[g] // self.settings.per_person]]  # as of people with one record
                lengths.append(self.difference(clean, range(g, g + 1), z, public)[0, 0].abs() * longest / self._span(g))
            if self.layout.exact is not None:
                lengths.append(self._exact_lengths(clean, public))
            found.append(torch.stack(lengths))
        return typical(found, self.settings.quantile)

    def _exact_lengths(self, clean: Clean, public: Bases) -> Tensor:
        if self.backward_to:
            joint: Tensor = torch.linalg.vector_norm(self._exact_part(clean).norms, dim=0)
            return joint
        index = len(self.sites) - 1
        return self.sites[index].norms(clean.calls[self.forward.uses[index][0]], self.slopes(clean, index, public[index]))

    # --- the exact last layer -----------------------------------------------------------------------------------------
    def slopes(self, clean: Clean, index: int, basis: Tensor | None) -> Tensor:
        """(records, dim): slopes of the loss along the coordinates of the last layer's output, by central differences."""
        site, call = self.sites[index], clean.calls[self.forward.uses[index][0]]
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
            try:
                passes.losses(clean, [move(self.forward, self.sites, clean, group, zeros, both_ways=False)])
            except RuntimeError as error:
                label = self.layout.label(group)
                raise ModelRefused(f"{label} can't be one group: {error} Use other groups, or groups=None.") from error
