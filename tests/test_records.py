"""Data sets of all kinds become batches; what can't is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dpulr.errors import DataError
from dpulr.records import Records
from tests.support.core import CPU


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
    with pytest.raises(DataError, match=message):
        Records(data, CPU)


def test_items_of_unequal_length_are_told_apart_from_bugs() -> None:
    ragged = Records([(torch.zeros(1 + i), i) for i in range(3)], CPU)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"don't fit into one batch.* Pad what varies in length"):
        ragged.take(np.arange(3))
