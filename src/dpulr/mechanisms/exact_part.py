"""The part of a step that a backward pass computes: exact gradients of some layers, to be clipped and added up.

`gradient` has no other part; `hidden-direction` has it for the layers behind the last point that can't be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpulr.model.differentiable import exact_layers
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean
from dpulr.model.sites import Site

if TYPE_CHECKING:
    from dpulr.mechanisms.hidden_direction import HiddenDirection


class ExactPart:
    """The exact gradients of the sites in `indices`, from a clean pass that has their slopes. `norms` are (sites, records)."""

    def __init__(self, sites: Sequence[Site], clean: Clean, indices: Sequence[int]) -> None:
        self.indices, self.sites, self.calls = indices, [sites[i] for i in indices], [clean.calls[i] for i in indices]
        own = zip(self.sites, self.calls, clean.slopes, strict=True)
        self.signals = [site.signal_of(call, slope) for site, call, slope in own]
        own = zip(self.sites, self.calls, self.signals, strict=True)
        self.norms = torch.stack([site.norms(call, signal) for site, call, signal in own])

    def add(self, scales: Tensor, parts: Sequence[Tensor], *, precise: bool) -> None:
        """Add the gradients, each record's times its scale (sites, records), to the sites' parts of a release."""
        for i, site, call, signal, scale in zip(self.indices, self.sites, self.calls, self.signals, scales, strict=True):
            site.add(call, signal, scale, parts[i], precise=precise)


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
