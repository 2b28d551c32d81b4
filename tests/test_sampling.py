"""Poisson batches have the law that the accounting assumes; data sets of all kinds become batches.

Statistical tests have fixed seeds and a false-alarm rate of 1e-6 each.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dpulr.sampling import PoissonSampling, Records, ShuffledSampling

ALARM = 1e-6
CPU = torch.device("cpu")


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
    with pytest.raises(ValueError, match=r"sample_rate|rejection_threshold"):
        PoissonSampling(rate, threshold)


def test_a_threshold_out_of_reach_is_refused() -> None:
    PoissonSampling(0.1, 90).check(1000)
    with pytest.raises(ValueError, match="rejection_threshold is 150"):
        PoissonSampling(0.1, 150).check(1000)


def test_shuffled_batches_cover_an_epoch_and_are_not_private() -> None:
    sampler, rng = ShuffledSampling(3), np.random.default_rng(0)
    epoch = np.concatenate([sampler.draw(9, rng) for _ in range(3)])
    assert sorted(epoch) == list(range(9))
    assert not sampler.private
    assert PoissonSampling(0.1).private


class Items(Dataset[Any]):
    """Items that are not tensors, and a note of every read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        self.reads.append(row)
        return self.items[row]


def test_nested_items_are_collated() -> None:
    items = [(({"a": np.ones(2) * i, "b": i}, (float(i), torch.full((3,), i))), i % 2) for i in range(5)]
    (mapping, pair), target = Records(Items(items), CPU).take(np.array([4, 1]))
    assert mapping["a"].tolist() == [[4, 4], [1, 1]]
    assert mapping["b"].tolist() == [4, 1]
    assert [part.tolist() for part in pair] == [[4.0, 1.0], [[4, 4, 4], [1, 1, 1]]]
    assert target.tolist() == [0, 1]
    (empty, _), target = Records(Items(items), CPU).take(np.array([], dtype=np.int64))
    assert empty["a"].shape == (0, 2)
    assert target.shape == (0,)


def test_items_are_read_only_when_drawn() -> None:
    data = Items([(torch.zeros(2), 0)] * 100)
    records = Records(data, CPU)
    assert data.reads == [0]  # for the shapes
    records.take(np.array([7, 3]))
    assert data.reads == [0, 7, 3]


def test_tensors_are_indexed_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.arange(20.0).view(10, 2), torch.arange(10)
    plain = TensorDataset(x, y)
    for data, rows in ((plain, [9, 0]), (Subset(Subset(plain, [0, 2, 4, 6]), [3, 1]), [6, 2])):
        records = Records(data, CPU)
        with monkeypatch.context() as patch:
            patch.setattr(TensorDataset, "__getitem__", None)
            patch.setattr(Subset, "__getitem__", None)
            patch.setattr(Subset, "__getitems__", None)
            inputs, targets = records.take(np.array([len(data) - 1, 0])) if data is plain else records.take(np.array([0, 1]))
        assert targets.tolist() == rows
        assert torch.equal(inputs, x[rows])


def test_subset_of_items_and_lists_of_lists() -> None:
    data = Subset(Items([(torch.full((2,), i), i) for i in range(6)]), [5, 3])
    inputs, targets = Records(data, CPU).take(np.array([1, 0]))
    assert targets.tolist() == [3, 5]
    assert inputs[:, 0].tolist() == [3, 5]


def test_a_batch_is_a_copy() -> None:
    """What a user does to a batch in place must not reach the data."""
    x = torch.zeros(4, 2)
    inputs, _ = Records(TensorDataset(x, torch.zeros(4)), CPU).take(np.arange(4))
    inputs += 1
    assert not x.any()


def test_targets_are_found_without_reading_items() -> None:
    y = torch.arange(6)
    assert torch.equal(Records(Subset(TensorDataset(y, y), [1, 2]), CPU).all_targets(), y[1:3])
    data = Items([(torch.zeros(1), 0)] * 3)
    assert Records(data, CPU).all_targets() is None
    data.targets = [0, 1, 2]  # as torchvision has it
    assert Records(data, CPU).all_targets().tolist() == [0, 1, 2]
    data.targets = ["a", "b"]
    assert Records(data, CPU).all_targets() is None
    data.targets, data.target_transform = [1, 2, 3], lambda target: target - 1
    assert Records(data, CPU).all_targets() is None
    assert set(data.reads) == {0}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "Stream.* must be map-style"),
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "TensorDataset.* is empty"),
        (TensorDataset(torch.zeros(3, 2)), "TensorDataset.* must be a pair"),
        (Items([torch.zeros(2)] * 3), "Items.* must be a pair"),
    ],
)
def test_unusable_data_sets_are_named(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Records(data, CPU)


def test_items_of_unequal_length_are_told_apart_from_bugs() -> None:
    ragged = Records([(torch.zeros(1 + i), i) for i in range(3)], torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"don't fit into one batch.* Pad what varies in length"):
        ragged.take(np.arange(3))
