"""Which records a step sees (docs/theory.md, sections 1 and 3). No torch.

Public settings are fields; what is private (the data, the random state) is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from scipy.special import bdtrc

from dpulr import validate
from dpulr.errors import InvalidArgument

_LEAST_ACCEPTANCE = 1e-3


@dataclass(frozen=True)
class PoissonSampling:
    """Every record enters a batch on its own with probability `sample_rate`; batches below the threshold are drawn again.

    Empty batches are legal: they give a step of noise alone.
    """

    sample_rate: float
    rejection_threshold: int = 0
    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate.rate(self.sample_rate)
        validate.whole_number("rejection_threshold", self.rejection_threshold, 0)

    def check(self, records: int) -> None:
        """Refuse a threshold that nearly no batch of a data set of this size reaches: drawing would never end."""
        if self.rejection_threshold and bdtrc(self.rejection_threshold - 1, records, self.sample_rate) < _LEAST_ACCEPTANCE:
            raise InvalidArgument(
                f"rejection_threshold is {self.rejection_threshold}, but batches of {records} records at sample_rate="
                f"{self.sample_rate:.3g} hold about {records * self.sample_rate:.0f}: nearly all would be drawn again."
            )

    def with_threshold(self, rejection_threshold: int) -> PoissonSampling:
        """The same rate with another threshold."""
        return self if rejection_threshold == self.rejection_threshold else replace(self, rejection_threshold=rejection_threshold)

    def draw(self, records: int, rng: np.random.Generator) -> np.ndarray:
        """Row numbers. The size is binomial, and given its size every subset is equally likely: the same as a coin per record."""
        size = -1
        while size < self.rejection_threshold:
            size = int(rng.binomial(records, self.sample_rate))
        return rng.choice(records, size, replace=False)


class ShuffledSampling:
    """Fixed-size batches from a random permutation, as the paper's experiments do. No guarantee is known for it."""

    private: ClassVar[bool] = False

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._order = np.empty(0, dtype=np.int64)

    def with_threshold(self, rejection_threshold: int) -> ShuffledSampling:
        return self

    def draw(self, records: int, rng: np.random.Generator) -> np.ndarray:
        if len(self._order) < self.batch_size:
            self._order = rng.permutation(records)
        batch, self._order = self._order[: self.batch_size], self._order[self.batch_size :]
        return batch
