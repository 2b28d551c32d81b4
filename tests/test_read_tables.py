"""Numbers straight from an Arrow table are those that the data set's items hold, bit for bit, odd rows included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Subset

from dpulr.data import Columns
from dpulr.read_items import Items
from dpulr.read_tables import Table
from dpulr.records import Records
from tests.support.core import CPU

datasets.disable_progress_bars()
N = 60
SCHEMA = (
    {
        "x": np.zeros(4, np.float32),
        "image": np.zeros((2, 3), np.uint8),
        "number": 0.5,
        "ids": np.zeros(3, np.int64),
        "deep": np.zeros((2, 2), np.float32),
    },
    0,
)


def table() -> Any:
    """Some rows have values that are missing, lists of another length, numbers that do not fit."""
    rng = np.random.default_rng(0)
    return datasets.Dataset.from_dict(
        {
            "x": [None if i % 11 == 0 else row.tolist() for i, row in enumerate(rng.standard_normal((N, 4)))],
            "image": [rng.integers(0, 300 if i % 7 == 0 else 256, (2, 3)).tolist() for i in range(N)],
            "number": [None if i % 13 == 0 else 1.1 * i for i in range(N)],
            "ids": [[1, None, 3] if i % 17 == 0 else [i, 2, 3, 4][: 2 if i % 5 == 0 else 3] for i in range(N)],
            "deep": [[[1.0, 2.0], [3.0]] if i % 19 == 0 else [[1.0 * i, 2.0], [3.0, 4.0]] for i in range(N)],
            "label": list(range(N)),
            "text": ["not a number"] * N,
        }
    )


def saved(folder: Path) -> Any:
    """In a file, in chunks of seven rows."""
    table().save_to_disk(str(folder / "saved"), num_shards=1)
    parts = [datasets.load_from_disk(str(folder / "saved")).select(range(i, min(i + 7, N))) for i in range(0, N, 7)]
    return datasets.concatenate_datasets(parts)


def fixed(data: Any) -> Any:
    """Types of fixed lengths, which only tables without other lengths can have."""
    whole = datasets.Dataset.from_list([row for row in data if len(row["ids"]) == 3 and max(map(max, row["image"])) < 256])
    whole = whole.cast_column("ids", datasets.List(datasets.Value("int32"), length=3))
    return whole.cast_column("image", datasets.Array2D((2, 3), "uint8"))


KINDS: dict[str, Any] = {
    "plain": lambda data: data,
    "torch": lambda data: data.with_format("torch"),
    "picked": lambda data: data.shuffle(seed=3).select(range(5, 50)),
    "fixed": fixed,
}


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_what_its_items_give(kind: str, in_file: bool, tmp_path: Path) -> None:
    data = KINDS[kind](saved(tmp_path) if in_file else table())
    view = Columns(data, inputs={name: name for name in SCHEMA[0]}, target="label")
    rows = np.random.default_rng(1).permutation(len(data))
    found = []
    for store in (Table, Items):
        records = Records(view, CPU, schema=SCHEMA)
        assert type(records._store) is Table
        if store is Items:
            records._store = Items(view)
        found.append(records.read(rows))
    (direct, kept), (items, expected) = found
    assert np.array_equal(kept, expected)
    assert 0 < len(kept) < len(rows)
    for a, b in zip(pytree.tree_leaves(direct), pytree.tree_leaves(items), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(7.5) if a.is_floating_point() else a, b.nan_to_num(7.5) if b.is_floating_point() else b)


def test_rows_are_read_without_asking_for_items(monkeypatch: pytest.MonkeyPatch) -> None:
    view = Columns(table().select(range(1, 5)), inputs="x", target="label")
    records = Records(Subset(view, [3, 2, 1, 0]), CPU)
    monkeypatch.setattr(Columns, "__getitem__", None)
    assert records.take(np.array([0, 3, 1]))[1].tolist() == [4, 1, 3]
    assert records.take(np.array([], dtype=np.int64))[1].tolist() == []


@pytest.mark.parametrize(
    "data",
    [
        table().with_transform(lambda rows: rows),
        table().with_format("numpy"),
        table().with_format("torch", columns=["x"], output_all_columns=True),
        table().with_format("torch", dtype=torch.float64),
    ],
    ids=["transform", "numpy", "some columns", "another type"],
)
def test_what_is_not_simply_the_table_is_read_by_items(data: Any) -> None:
    schema = (np.zeros(4), 0)
    assert type(Records(Columns(data, inputs="x", target="label"), CPU, schema=schema)._store) is Items
    text = Columns(table(), inputs="text", target="label")
    assert type(Records(text, CPU, schema=schema)._store) is Items
