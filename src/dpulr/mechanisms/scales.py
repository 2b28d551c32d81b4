"""Where layers clip: given, measured on synthetic records, or following a private quantile (docs/theory.md, section 10).

Following it costs one vote per record, layer and step: was my gradient below the scale? The votes are summed and noised with the
rest of the release, and the next scales are computed from that sum alone (Andrew et al., "Differentially private learning with
adaptive clipping", 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dpulr import validate
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.model.batches import rows, synthetic
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean

Scale = float | Literal["auto", "adaptive"]
LEAST = 1e-30
"""Well within float32: nothing is divided by zero."""
_MOST = 1e30
_RATE = 0.3  # of the geometric update: at most 0.3 of a scale's logarithm per step
_NOISE_OF_VOTES = 10.0
"""Noise of the votes over that of the rest of the release: 1 % of what a step costs."""
_SYNTHETIC_RECORDS, _IF_ONE_BY_ONE = 64, 8


def check_scale(name: str, value: Scale) -> None:
    """A positive number, "auto" or "adaptive"."""
    if isinstance(value, str):
        validate.one_of(name, value, ("auto", "adaptive"))
    else:
        validate.at_least(name, value, LEAST)


def check_quantile(value: float) -> None:
    validate.fraction("quantile", value)


def noise_of_votes(equivalent_noise: float) -> float:
    """The noise multiplier of all votes of a record together, given that of the rest of the release."""
    return _NOISE_OF_VOTES * equivalent_noise


class Scales:
    """A scale per group of layers, above which a record is clipped. Public.

    votes  how many numbers of a release are sums of votes: one per scale if they adapt, else none
    vote   what a record adds to each: plus so much if it is below the scale, minus so much if not
    """

    def __init__(
        self, values: Tensor, *, quantile: float = 0.0, noise_std: float = 0.0, noise_multiplier: float = 0.0, batch: float = 1.0
    ) -> None:
        self.values, self.quantile, self._batch = values.clamp(LEAST, _MOST), quantile, batch
        self.votes = len(values) if noise_multiplier > 0 else 0
        share = noise_std / (noise_multiplier * math.sqrt(len(values))) if self.votes else 0.0
        self.vote = WITH_MARGIN * share

    def count(self, below: Tensor, absent: Sequence[int], into: Tensor, own: Tensor | float = 1.0) -> None:
        """Add the votes of records (scales, records) to the release's part for them. Each is plus or minus `vote`, never 0, but
        `absent` rows have none.

        `own` is 1 for the scales that this process votes about, 0 for those of others.
        """
        votes = torch.where(below, self.vote, -self.vote)
        if absent:
            votes[:, list(absent)] = 0
        into += (votes.sum(1, dtype=torch.float64) * own).to(into.dtype)

    def follow(self, released: Tensor) -> None:
        """Move the scales towards the quantile. `released` is public: the noised sums of votes."""
        share = (released / (self.vote * self._batch)).add(1).div(2).clamp(0, 1)
        step = torch.exp(_RATE * (self.quantile - share)).to(self.values)
        self.values = self.values.mul(step).clamp(LEAST, _MOST)

    def state(self) -> list[float]:
        return [float(value) for value in self.values]

    def load(self, values: Sequence[float]) -> None:
        found = torch.tensor([float(value) for value in values], dtype=self.values.dtype, device=self.values.device)
        if found.shape != self.values.shape or not bool((found > 0).all()):
            raise InvalidArgument(f"the stored scales {list(values)} do not fit: {len(self.values)} positive numbers are expected.")
        self.values = found.clamp(LEAST, _MOST)


def trial(forward: Forward, backward_to: Sequence[int] = ()) -> list[Clean]:
    """Clean passes over records that are nobody's, to measure scales on."""
    records = _IF_ONE_BY_ONE if forward.recordwise else _SYNTHETIC_RECORDS
    inputs, targets = synthetic(rows(forward.probe, 0, 1), records, torch.Generator().manual_seed(0), forward.device)
    return forward.clean(inputs, targets, backward_to)


def typical(sizes: Sequence[Tensor], quantile: float) -> Tensor:
    """For each group the quantile of the sizes (groups, records) of all passes that are finite and not 0; 1 where there is none."""
    found = []
    for row in torch.cat(list(sizes), dim=1).double():
        kept = row[torch.isfinite(row) & (row > 0)]
        found.append(torch.quantile(kept, quantile) if len(kept) else row.new_ones(()))
    return torch.stack(found).to(sizes[0].dtype)
