"""The part of a step that a backward pass computes: exact gradients of some layers, to be clipped and added up.

`gradient` has no other part; `hidden-direction` has it for the layers behind the last point that can't be differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpulr.mechanisms.person_norms import averaged, per_unit
from dpulr.model.differentiable import exact_layers
from dpulr.model.forward import Forward
from dpulr.model.layers import Call
from dpulr.model.passes import Clean
from dpulr.model.people import People
from dpulr.model.shared_sites import SharedSite
from dpulr.model.signals import Signal
from dpulr.model.sites import Site, norms_of

if TYPE_CHECKING:
    from dpulr.mechanisms.hidden_direction import HiddenDirection


class ExactPart:
    """The exact gradients of `sites`, from a clean pass that has their slopes: one for each of their `uses`, in this order.

    `norms` are (sites, records); where there are people, those of the mean gradient of the person that a record belongs to.
    """

    def __init__(self, sites: Sequence[Site], uses: Sequence[Sequence[int]], clean: Clean) -> None:
        self.sites, self.calls = sites, [[clean.calls[i] for i in members] for members in uses]
        slopes = iter(clean.slopes)
        self.signals = [
            signals_of(site, calls, [next(slopes) for _ in calls]) for site, calls in zip(sites, self.calls, strict=True)
        ]
        if clean.people is None and not any(isinstance(site, SharedSite) for site in sites):
            self.norms = norms_of(sites, [calls[0] for calls in self.calls], [signals[0] for signals in self.signals])
        else:
            own = [_per_unit(*one, clean.people) for one in zip(sites, self.calls, self.signals, strict=True)]
            self.signals, self.norms = [signals for signals, _ in own], torch.stack([norms for _, norms in own])
        self._clean, self._finite_norms_suffice = clean, all(site.rule.finite_gain_suffices for site in sites)

    def signals_times(self, scales: Tensor, places: Sequence[int]) -> Iterator[Signal]:
        """The gradients, each record's times its scale (sites, or 1 for all of them, records), which is overwritten.

        `places`: the numbers of the sites in the release.
        """
        self._clean.silence(scales)
        finite = self._finite_norms_suffice and math.isfinite((self.norms.sum() + scales.sum()).item())
        for one in zip(places, self.sites, self.calls, self.signals, scales.expand_as(self.norms), strict=True):
            yield Signal(*one, finite=finite, exact=self._clean.people is not None)


def signals_of(site: Site, calls: Sequence[Call], slopes: Sequence[Tensor]) -> list[Tensor]:
    return site.signals_of(calls, slopes) if isinstance(site, SharedSite) else [site.signal_of(calls[0], slopes[0])]


def _per_unit(site: Site, calls: Sequence[Call], signals: list[Tensor], people: People | None) -> tuple[list[Tensor], Tensor]:
    if not isinstance(site, SharedSite):
        signal, norms = per_unit(site, calls[0], signals[0], people)
        return [signal], norms
    if people is not None:
        signals = [averaged(signal, people) for signal in signals]
    norms = site.joint_norms(calls, signals)
    return signals, norms if people is None else people.to_rows(people.summed(norms))


def settle_exact(settings: HiddenDirection, forward: Forward) -> HiddenDirection:
    """`exact="auto"` as names: the layers whose gradient by autograd is that of the loss."""
    if settings.exact != "auto":
        return settings
    return replace(settings, exact=tuple(name for name, judged in exact_layers(forward).items() if judged.exact))


def exact_notes(settings: HiddenDirection, forward: Forward) -> list[str]:
    """What a backward pass could do on this model, or why it takes hidden directions where it does."""
    judged = exact_layers(forward)
    able = [name for name, one in judged.items() if one.exact]
    if len(able) == len(judged):
        return [
            "This model can be differentiated from end to end: mechanism 'gradient' (DP-SGD) reaches the same epsilon faster, by "
            "one backward pass per step."
        ]
    if settings.exact == "none":
        some = (
            f"Exact gradients can be had, by one backward pass per step, for {', '.join(map(repr, able))}: exact='auto' takes them."
        )
        return [some] if able else []
    named = set(settings.exact_names)
    taken = [f"Exact by name: {one.doubt}." for name, one in judged.items() if one.doubt and name in named]
    return taken + [f"Hidden directions: {one.reason}." for name, one in judged.items() if name not in named and not one.exact]
