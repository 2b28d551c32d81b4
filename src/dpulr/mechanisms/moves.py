"""How a group of layers is moved along secret directions, and how far: `radius="auto"` looks for steps on synthetic records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpulr.model.batches import rows, synthetic
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean, Move, Shift
from dpulr.model.shared_sites import RepeatedSite
from dpulr.model.sites import Bases, PublicBases, Site

if TYPE_CHECKING:
    from dpulr.mechanisms.hidden_direction import HiddenDirection

USUAL_RADIUS = 0.1
RADII = tuple(USUAL_RADIUS * 10 ** (k / 2) for k in (0, -1, 1, -2, 2, 3, 4, 5, 6))
"""What "auto" tries. It takes the best; but the first, the usual one, or else a wider one, if that is nearly as good."""
_NEARLY, _WIDER = 0.95, 0.85
_PER_DIMENSION, _RECORDS = 4, 16
_SEED = 20_240_305  # public: only synthetic records are moved along these directions


def move(
    forward: Forward, sites: Sequence[Site], clean: Clean, group: Sequence[int], deltas: Sequence[Tensor], *, both_ways: bool
) -> Move:
    """The sites of a group moved by `deltas` (repeats, records, dim each); or by them, and against them, as twice the repeats."""
    first, *rest = [shift for i, delta in zip(group, deltas, strict=True) for shift in _shifts(forward, sites, clean, i, delta)]
    call = clean.calls[first.site_index]
    if not both_ways:
        return Move(first.site_index, first.site.moved(call, first.delta), rest)
    rest = [Shift(i, site, torch.cat([delta, -delta])) for i, site, delta in rest]
    return Move(first.site_index, first.site.moved_both_ways(call, first.delta), rest)


def _shifts(forward: Forward, sites: Sequence[Site], clean: Clean, place: int, delta: Tensor) -> list[Shift]:
    """A site's move, call by call."""
    site, uses = sites[place], forward.uses[place]
    if not isinstance(site, RepeatedSite):
        return [Shift(uses[0], site, delta)]
    shares = site.joint([clean.calls[i] for i in uses]).shares.to(delta)
    return [Shift(i, one, share.unsqueeze(1) * delta) for i, one, share in zip(uses, site.members, shares, strict=True)]


def along(sites: Sequence[Site], group: Sequence[int], z: Tensor, radius: float, public: Bases) -> list[Tensor]:
    """What each site of a group is moved by: radius times the directions z (repeats, records, dim), a standard deviation each."""
    length = radius * math.sqrt(z.shape[2])
    parts = shares(sites, group, z)
    return [sites[i].perturbation(part, length * sites[i].scale, public[i]) for i, part in zip(group, parts, strict=True)]


def shares(sites: Sequence[Site], group: Sequence[int], signal: Tensor) -> tuple[Tensor, ...]:
    """What each site of a group has of a vector."""
    if len(group) == 1:
        return (signal,)
    return torch.split(signal, [sites[i].dim for i in group], dim=-1)


# --- radius="auto" --------------------------------------------------------------------------------------------------------
def settle_radius(settings: HiddenDirection, forward: Forward) -> HiddenDirection:
    """`radius="auto"` as numbers: one for each group of layers, or one if they agree.

    A sign or a spike answers a small move by nothing, or by a jump that says little about the direction. So several radii are tried
    on synthetic records, and for each it is measured how much of the differences of the loss a linear function of the direction
    explains. The usual radius is kept where none is better.
    """
    if settings.radius != "auto":
        return settings
    explained = explained_shares(settings, forward)
    if not len(explained):
        return replace(settings, radius=USUAL_RADIUS)
    radii = tuple(float(f"{_best(shares):.2g}") for shares in explained.tolist())
    return replace(settings, radius=radii if len(set(radii)) > 1 else radii[0])


def _best(shares: Sequence[float]) -> float:
    """Of steps, one wider than usual: weights grow as they learn, by noise too, and what a step answers to grows with them.

    But the narrowest of those that do: behind a very wide move nothing is left of what the clean pass had.
    """
    by_radius = dict(zip(RADII, shares, strict=True))
    most = max(shares)
    if by_radius[USUAL_RADIUS] >= _NEARLY * most:
        return USUAL_RADIUS
    wider = [radius for radius in RADII if radius > USUAL_RADIUS and by_radius[radius] >= _WIDER * most]
    return min(wider, default=max(RADII, key=lambda radius: by_radius[radius]))


def explained_shares(settings: HiddenDirection, forward: Forward) -> Tensor:
    """(hidden groups, radii): how much of the differences of the loss a linear function of the direction explains."""
    layout = settings.layout(forward.sites)
    with torch.inference_mode(), forward.checked_mode(), torch.random.fork_rng():
        public = PublicBases(layout.sites, torch.Generator().manual_seed(_SEED), forward.dtype, forward.device).draw()
        records = synthetic(rows(forward.probe, 0, 1), _RECORDS, torch.Generator().manual_seed(_SEED), forward.device)
        cleans = forward.clean(*records)
        return torch.tensor(
            [
                [_explained(forward, layout.sites, cleans, group, dim, radius, public) for radius in RADII]
                for group, dim in zip(layout.hidden_groups, layout.dims, strict=False)
            ]
        )


def _explained(
    forward: Forward, sites: Sequence[Site], cleans: Sequence[Clean], group: Sequence[int], dim: int, radius: float, public: Bases
) -> float:
    """The share of the variance of a record's differences that a linear function of the direction has: a mean over records."""
    generator = torch.Generator().manual_seed(_SEED)
    found = []
    for clean in cleans:
        normal = torch.randn(_PER_DIMENSION * dim, clean.records, dim, generator=generator, dtype=forward.dtype)
        z = (normal / torch.linalg.vector_norm(normal, dim=2, keepdim=True)).to(forward.device)
        moved = move(forward, sites, clean, group, along(sites, group, z, radius, public), both_ways=False)
        difference = (forward.all_losses(clean, [moved])[0] - clean.losses).nan_to_num(0, 0, 0).double().t()  # (records, repeats)
        directions = torch.cat([z.double().transpose(0, 1), z.new_ones(clean.records, len(z), 1).double()], dim=2)
        fitted = (directions @ torch.linalg.lstsq(directions, difference.unsqueeze(2)).solution).squeeze(2)
        total = difference.var(1) * (len(z) - 1)
        left = (difference - fitted).square().sum(1) * (len(z) - 1) / (len(z) - dim - 1)  # of chance alone nothing is explained
        found.append(torch.where(total > 0, 1 - left / total.clamp_min(1e-300), 0).clamp_min(0))
    return float(torch.cat(found).mean())
