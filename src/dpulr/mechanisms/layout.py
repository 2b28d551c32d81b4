"""Which layers share a hidden direction, which are exact, and what a step of that releases.

Public: it depends on shapes and settings only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dpulr.accounting.events import HiddenDirectionRelease, HiddenSite
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import LEAST_BOUND
from dpulr.mechanisms.layer_budget import LayerCost, balanced
from dpulr.mechanisms.scales import noise_of_votes
from dpulr.model.shared_sites import SharedSite
from dpulr.model.sites import OutputSite, Site, make_site

if TYPE_CHECKING:
    from dpulr.mechanisms.hidden_direction import HiddenDirection

_MOST_EXACT = 1_000


class Layout:
    """The sites of a model under some settings.

    sites   each in its public subspace, but for those of a backward pass: all of a gradient costs no more than a part of it
    groups  the sites that share a direction, first to last: one each, or several neighbours; the exact ones, together, are the last
    dims    the dimensions of each group's direction; a person's has a block for each of his or her records
    exact   the number of the exact group, if there is one
    """

    def __init__(self, settings: HiddenDirection, sites: Sequence[Site]) -> None:
        self.settings = settings
        if settings.last_layer == "exact":
            self._check_last(sites[-1])
        self.backward_to = self._named(sites)
        self.sites = [_whole(site) if i in self.backward_to else site.within(settings.kept_dims) for i, site in enumerate(sites)]
        self.groups = self._groups()
        self.dims = [settings.per_person * sum(self.sites[i].dim for i in group) for group in self.groups]
        self.exact = len(self.groups) - 1 if settings.last_layer == "exact" or self.backward_to else None
        self.hidden_groups = self.groups if self.exact is None else self.groups[:-1]
        if settings.layer_weights != "auto":
            self._check_weights(settings.layer_weights)

    def _named(self, sites: Sequence[Site]) -> list[int]:
        """The sites of the backward pass."""
        places = {site.name: i for i, site in enumerate(sites)}
        for name in self.settings.exact_names:
            if name not in places:
                known = ", ".join(map(repr, places))
                raise InvalidArgument(f"exact names {name!r}, which is no layer of this model that is trained; there are {known}.")
        return sorted(places[name] for name in self.settings.exact_names)

    def _groups(self) -> list[Sequence[int]]:
        last = len(self.sites) - 1
        exact = [last] if self.settings.last_layer == "exact" else self.backward_to
        hidden = [i for i in range(len(self.sites)) if i not in exact]
        count = len(hidden) if self.settings.groups is None else self.settings.groups
        if count > len(hidden):
            raise InvalidArgument(f"groups is {count}, but there are only {len(hidden)} layers to share among them.")
        borders = [round(g * len(hidden) / count) for g in range(count + 1)] if count else [0]
        groups: list[Sequence[int]] = [hidden[slice(*pair)] for pair in pairwise(borders)]
        return [*groups, exact] if exact else groups

    def release(self, noise_multiplier: float) -> HiddenDirectionRelease:
        ratios = [noise_multiplier / weight for weight in self.weights(noise_multiplier)]
        repeats = self.settings.count
        hidden = tuple(HiddenSite(self.dims[g], ratios[g], repeats) for g in range(len(self.hidden_groups)))
        exact = () if self.exact is None else (ratios[self.exact],)
        still = HiddenDirectionRelease(hidden, exact, numbers=sum(site.size for site in self.sites))
        if not self.votes:
            return still
        noise = noise_of_votes(still.equivalent_noise())
        return replace(still, gaussian=(*exact, noise), numbers=still.numbers + self.votes)

    @property
    def votes(self) -> int:
        """How many scales follow the records: one per group, or none. Their noise is the last Gaussian part of a release."""
        return len(self.groups) if self.settings.kappa == "adaptive" else 0

    def weights(self, noise_multiplier: float) -> tuple[float, ...]:
        """The bound C of each group."""
        if self.settings.layer_weights != "auto":
            return tuple(float(weight) for weight in self.settings.layer_weights)
        shared = [1 if g == self.exact else len(group) for g, group in enumerate(self.groups)]  # exact layers are clipped together
        guesses = [
            math.sqrt(sum(self.sites[i].fan_in for i in group) / parts) for group, parts in zip(self.groups, shared, strict=True)
        ]
        if self.backward_to:
            guesses = [self._seen(g) * gradient for g, gradient in enumerate(guesses)]
        costs = [
            LayerCost.exact(gradient) if g == self.exact else LayerCost.hidden(dim, self.settings.count, gradient)
            for g, (dim, gradient) in enumerate(zip(self.dims, guesses, strict=True))
        ]
        return balanced(costs, noise_multiplier or 1.0)

    def _seen(self, g: int) -> float:
        """How much of a gradient's length a step sees: K directions in d dimensions see sqrt(K / d) of it, a backward pass all."""
        full = sum(self.sites[i].full_dim for i in self.groups[g])
        return 1.0 if g == self.exact else math.sqrt(min(1.0, self.settings.count / full))

    def label(self, group: Sequence[int]) -> str:
        return " + ".join(self.sites[i].label for i in group)

    @staticmethod
    def _check_last(site: Site) -> None:
        if not isinstance(site, OutputSite) or site.full_dim > _MOST_EXACT:
            raise ModelRefused(
                f"last_layer='exact' needs a last layer with an output space of at most {_MOST_EXACT} numbers; {site.label} "
                f"has {site.full_dim} in {site.space} space. Use last_layer='hidden'."
            )

    def _check_weights(self, weights: tuple[float, ...]) -> None:
        if len(weights) != len(self.groups) or not all(LEAST_BOUND <= w < math.inf for w in weights):
            names = ", ".join(self.label(group) for group in self.groups)
            raise InvalidArgument(
                f"layer_weights must be {len(self.groups)} positive numbers, one each for {names}; got {weights}."
            )


def _whole(site: Site) -> Site:
    """The same site for an exact gradient: at the layer's output wherever its rule knows that, and all of it."""
    if isinstance(site, SharedSite):
        return SharedSite(site.members)
    whole = make_site(site.layer, site.output_shape, "known-output")
    whole.rule.scratch = site.rule.scratch
    return whole
