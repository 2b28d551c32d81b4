"""Bits that keep the size of a difference of losses: in which units, so that they stay in proportion to the gradient.

A site of gain |x| that is moved by scale times z has a gradient |x| <u, z>, u the slope at its output, where the loss differs by
scale <u, z>. So the difference is multiplied by |x| / scale, the site's reach, before it is clipped. Sites that share a direction
share the longest reach: each signal is then divided by it, rather than by the site's own gain (docs/theory.md, section 10).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpulr.model.sites import Site

Groups = Sequence[Sequence[int]]


def reaches(sites: Sequence[Site], groups: Groups, gains: Tensor) -> Tensor:
    """(groups, records): how long a group's gradient is per difference of losses, at most. `gains` are (sites, records)."""
    own = dict(zip([i for group in groups for i in group], gains, strict=True))
    return torch.stack([torch.stack([own[i] / sites[i].scale for i in group]).amax(0) for group in groups])


def joint_gains(sites: Sequence[Site], groups: Groups, reach: Tensor) -> Tensor:
    """(sites of groups, records): what signals are divided by. At least the sites' own gains, so that all bounds hold."""
    return torch.stack([longest * sites[i].scale for group, longest in zip(groups, reach, strict=True) for i in group])
