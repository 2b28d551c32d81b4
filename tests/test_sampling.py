"""Poisson batches have the law that the accounting assumes.

Statistical tests have fixed seeds and a false-alarm rate of 1e-6 each.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from dpulr.errors import InvalidArgument
from dpulr.sampling import PoissonSampling, ShuffledSampling

ALARM = 1e-6


@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.parametrize("threshold", [0, 1, 3])
def test_every_subset_has_its_probability(rate: float, threshold: int) -> None:
    """All 16 batches of 4 records: independent coins, conditioned on reaching the threshold."""
    records, draws, rng = 4, 40_000, np.random.default_rng(1)
    subsets = [s for k in range(threshold, records + 1) for s in itertools.combinations(range(records), k)]
    chance = np.array([rate ** len(s) * (1 - rate) ** (records - len(s)) for s in subsets])
    sampling = PoissonSampling(rate, threshold)
    counts = dict.fromkeys(subsets, 0)
    for _ in range(draws):
        counts[tuple(sorted(sampling.draw(records, rng).tolist()))] += 1  # a batch below the threshold is a KeyError
    assert chisquare(list(counts.values()), draws * chance / chance.sum()).pvalue > ALARM


@pytest.mark.parametrize(("records", "rate"), [(300, 0.2), (20_000, 0.002)])
def test_sizes_are_binomial_and_rows_uniform(records: int, rate: float) -> None:
    """Both ways in which numpy chooses without replacement: few of many, and a good part."""
    rng, sampling, draws = np.random.default_rng(2), PoissonSampling(rate), 3_000
    batches = [sampling.draw(records, rng) for _ in range(draws)]
    assert all(len(np.unique(batch)) == len(batch) for batch in batches)
    mean = records * rate
    edges = np.arange(int(mean - 2 * mean**0.5), int(mean + 2 * mean**0.5))
    sizes = np.searchsorted(edges, [len(batch) for batch in batches])
    chance = np.diff(np.concatenate([[0], binom.cdf(edges, records, rate), [1]]))
    assert chisquare(np.bincount(sizes, minlength=len(chance)), draws * chance).pvalue > ALARM
    places = np.concatenate(batches) * 20 // records  # twenty equal stretches of the data set
    assert chisquare(np.bincount(places, minlength=20)).pvalue > ALARM


def test_batches_are_independent_of_each_other() -> None:
    rng, sampling = np.random.default_rng(3), PoissonSampling(0.5)
    inside = np.array([[row in sampling.draw(2, rng) for row in range(2)] for _ in range(8_000)])
    both = np.histogram2d(inside[:-1, 0], inside[1:, 0], bins=2)[0]
    assert chisquare(both.ravel()).pvalue > ALARM


def test_empty_batches_are_legal() -> None:
    assert len(PoissonSampling(1e-9).draw(10, np.random.default_rng(0))) == 0


@pytest.mark.parametrize(("rate", "threshold"), [(0.0, 0), (1.1, 0), (float("nan"), 0), (0.5, -1), (0.5, 1.5), (0.5, True)])
def test_impossible_settings_are_refused(rate: float, threshold: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"sample_rate|rejection_threshold"):
        PoissonSampling(rate, threshold)


def test_a_threshold_out_of_reach_is_refused() -> None:
    PoissonSampling(0.1, 90).check(1000)
    with pytest.raises(InvalidArgument, match="rejection_threshold is 150"):
        PoissonSampling(0.1, 150).check(1000)


def test_shuffled_batches_cover_an_epoch_and_are_not_private() -> None:
    sampler, rng = ShuffledSampling(3), np.random.default_rng(0)
    epoch = np.concatenate([sampler.draw(9, rng) for _ in range(3)])
    assert sorted(epoch) == list(range(9))
    assert not sampler.private
    assert PoissonSampling(0.1).private
