"""Bounded signals of the records of one clean pass, before they are summed: what a mechanism makes of each record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr.model.layers import Call
from dpulr.model.shared_sites import RepeatedSite, SharedSite
from dpulr.model.sites import Site


class Signal(NamedTuple):
    """A site's signals (records, dim), one for each use of its parameters, and what each record's is multiplied by.

    place   the number of the site among the parts of a release
    finite  every record's gradient is known to be finite
    exact   added up in float64: where people are protected, whose records' terms may cancel
    """

    place: int
    site: Site
    calls: Sequence[Call]
    signals: Sequence[Tensor]
    scale: Tensor
    finite: bool = False
    exact: bool = False

    def add_to(self, parts: Sequence[Tensor]) -> None:
        """Add the sum over all records to the site's part of a release."""
        part = parts[self.place]
        if isinstance(self.site, SharedSite) and not isinstance(self.site, RepeatedSite):
            self.site.add_joint(self.calls, self.signals, self.scale, part)
        else:
            self.site.add(self.calls[0], self.signals[0], self.scale, part, finite=self.finite, exact=self.exact)

    def per_record(self) -> list[Tensor]:
        """All that the sum is made of, a row per record."""
        leaves = pytree.tree_leaves([(call.args, call.kwargs) for call in self.calls])
        marks = [mark for call in self.calls for mark in call.per_record]
        carried = [leaf for leaf, marked in zip(leaves, marks, strict=True) if marked]
        return [self.scale, *self.signals, *(leaf for leaf in carried if isinstance(leaf, torch.Tensor))]
