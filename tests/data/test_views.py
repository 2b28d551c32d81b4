"""Columns of dict-like items become pairs, one item at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from dpulr.data import Columns
from dpulr.records import Records
from tests.support.core import CPU

ITEMS = [{"ids": [i, i + 1], "mask": [1, 1], "label": i % 3, "text": "not a number"} for i in range(6)]


class Formatted:
    """As a Hugging Face data set: dicts of lists for many rows, and a transform that sees all of them."""

    def __init__(self, items: list[dict[str, Any]], as_tensors: bool) -> None:
        self.items, self.as_tensors = items, as_tensors

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: Any) -> Any:
        assert type(key) is int, "read as a batch"
        item = self.items[key]
        return {k: torch.tensor(v) if self.as_tensors and k != "text" else v for k, v in item.items()}

    def __getitems__(self, rows: list[int]) -> Any:
        raise AssertionError("read as a batch")


@pytest.mark.parametrize("dataset", [ITEMS, Formatted(ITEMS, False), Formatted(ITEMS, True)], ids=["list", "plain", "tensors"])
def test_columns_become_inputs_and_target(dataset: Any) -> None:
    rows = np.array([4, 1])
    inputs, target = Records(Columns(dataset, inputs="ids", target="label"), CPU).take(rows)
    assert inputs.tolist() == [[4, 5], [1, 2]]
    assert target.tolist() == [1, 1]
    both = Columns(dataset, inputs=["ids", "mask"], target="label")
    (ids, mask), _ = Records(Subset(both, [5, 4, 3, 2, 1]), CPU).take(rows)
    assert ids.tolist() == [[1, 2], [4, 5]]
    assert mask.shape == (2, 2)
    inputs, _ = Records(Columns(dataset, inputs={"input_ids": "ids", "attention_mask": "mask"}, target="label"), CPU).take(rows)
    assert list(inputs) == ["input_ids", "attention_mask"]


def test_odd_items_are_left_out() -> None:
    odd = [{"ids": [1, 2, 3], "label": 0}, {"ids": [1, None], "label": 0}, {"label": 0}, {"ids": [[1], 2], "label": 0}, None]
    inputs, target = Records(Columns([*ITEMS, *odd], inputs="ids", target="label"), CPU).take(np.arange(11))
    assert inputs.tolist() == [item["ids"] for item in ITEMS]
    assert len(target) == 6


def test_hugging_face_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ITEMS).save_to_disk(str(tmp_path / "saved"))
    mapped = datasets.load_from_disk(str(tmp_path / "saved"))  # its table lies in a file
    padded = mapped.with_transform(lambda rows: {"ids": [row * len(rows["ids"]) for row in rows["ids"]], "label": rows["label"]})
    for dataset in (mapped, mapped.with_format("torch"), mapped.with_format("numpy"), padded, mapped.select([0, 1, 2, 3, 4, 5])):
        for view in (
            Columns(dataset, inputs="ids", target="label"),
            Columns(Subset(dataset, range(6)), inputs="ids", target="label"),
        ):
            records = Records(view, CPU)
            assert str(records.schema) == "int64 of shape (2,) and int64 of shape ()"
            inputs, target = records.take(np.array([4, 1, 2]))
            assert inputs.tolist() == [[4, 5], [1, 2], [2, 3]]
            assert target.tolist() == [1, 1, 2]
