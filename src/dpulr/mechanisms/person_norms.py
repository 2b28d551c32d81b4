"""The length of a person's mean gradient, where a person's records are clipped as one (docs/theory.md, "People")."""

from __future__ import annotations

import torch
from torch import Tensor

from dpulr.model.layers import Call
from dpulr.model.people import People
from dpulr.model.sites import OutputSite, Site, WeightSite
from dpulr.norms import flat_norm


def per_unit(site: Site, call: Call, signal: Tensor, people: People | None) -> tuple[Tensor, Tensor]:
    """The signals to be added up, and for each record the norm that its clipping goes by.

    Without people: that of its own gradient. With them: signals are divided by the number of the person's records, and the norm is
    that of their sum, the person's mean gradient; or, where no rule knows that, the sum of the norms, which is no smaller.
    """
    if people is None:
        return signal, site.norms(call, signal)
    signal = averaged(signal, people)
    joint = _joint(site, call, signal, people)
    return signal, people.to_rows(people.summed(site.norms(call, signal)) if joint is None else joint)


def averaged(signal: Tensor, people: People) -> Tensor:
    """Each row's signal over the number of its person's rows. What is not finite becomes zero: it would cost the whole person."""
    share = signal / people.to_rows(people.sizes).unsqueeze(1)
    return torch.where(torch.isfinite(share), share, 0)


def _joint(site: Site, call: Call, signal: Tensor, people: People) -> Tensor | None:
    """(people,): the norm of the sum of each person's gradients; None where no rule knows it. Further records are further calls."""
    if isinstance(site, WeightSite):
        return flat_norm(people.summed(signal.t()).t())
    if not isinstance(site, OutputSite):
        return None
    calls: list[Call] = []
    signals: list[Tensor] = []
    for rows, held in people.by_slot():
        calls.append(call.chosen(rows))
        signals.append(site.shaped(torch.where(held.unsqueeze(1), signal[rows], 0), call))
    return site.rule.joint_norms(calls, signals) if calls else signal.new_zeros(0)
