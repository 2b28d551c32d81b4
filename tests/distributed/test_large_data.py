"""Data that does not fit: a step costs time and memory of its batch, on one process and on several ranks."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import dpulr
from tests.support.core import engine, small_mlp
from tests.support.processes import on_ranks

RECORDS, BATCH, STEPS = 10**9, 40, 4
MEBIBYTE = 2**20


class Billion(Dataset[Any]):
    """Records that exist only on demand, and a list of those that were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, row: int) -> Any:
        self.asked.append(row)
        return torch.tensor([row % 7, row % 5, row % 3, 1.0]), row % 2


def trained(data: Any, **settings: Any) -> tuple[dpulr.PrivacyEngine, int, int]:
    """The engine, the records of all batches, and the most memory that steps have held at a time."""
    private, seen = engine(small_mlp(), data, mechanism="gradient", batch_size=BATCH, steps=STEPS, **settings), 0
    tracemalloc.start()
    for inputs, targets in private.batches():
        seen += len(targets)
        private.step(inputs, targets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return private, seen, peak


def on_demand(rank: int, num_workers: int = 0) -> tuple[int, int, list[int]]:
    """Records seen, memory, and the rows asked for in steps."""
    data = Billion()
    private, seen, peak = trained(data, num_workers=num_workers)
    assert private.guarantee == "certified"
    assert private.sample_rate == BATCH / RECORDS
    return seen, peak, data.asked


def test_a_step_on_a_billion_records_reads_its_batch_alone() -> None:
    """Nothing is listed: 10^9 row numbers would be 8 GB. 160 records are expected, 6 standard deviations are 76."""
    seen, peak, asked = on_demand(0)
    assert 84 < seen < 236
    assert len(asked) <= seen + 1  # and one that says what records look like
    assert peak < MEBIBYTE
    assert max(asked) > RECORDS / 2


def test_two_ranks_share_a_billion_records() -> None:
    found = on_ranks(2, on_demand)
    assert 84 < sum(seen for seen, _, _ in found) < 236
    for rank, (seen, peak, asked) in enumerate(found):
        assert len(asked) <= seen + 1
        assert peak < MEBIBYTE
        assert {row % 2 for row in asked[-seen:]} == {rank}


def test_workers_read_ahead_of_the_step() -> None:
    """The data set is asked in other processes, not in this one."""
    seen, peak, asked = on_demand(0, num_workers=2)
    assert 84 < seen < 236
    assert len(asked) <= 1
    assert peak < 2 * MEBIBYTE


MAPPED = {"x": (np.float32, (10**8, 4)), "y": (np.int64, (10**8,))}


def mapped(rank: int, folder: Path) -> tuple[int, int]:
    x, y = (np.memmap(folder / name, mode="r", dtype=dtype, shape=shape) for name, (dtype, shape) in MAPPED.items())
    _, seen, peak = trained(dpulr.data.ArrayDataset(x, y))
    return seen, peak


def test_two_ranks_read_files_of_gigabytes_by_rows(tmp_path: Path) -> None:
    for name, (dtype, shape) in MAPPED.items():
        np.memmap(tmp_path / name, mode="w+", dtype=dtype, shape=shape)  # sparse files
    found = on_ranks(2, mapped, tmp_path)
    assert 84 < sum(seen for seen, _ in found) < 236
    assert max(peak for _, peak in found) < MEBIBYTE


def tabled(rank: int, folder: Path) -> tuple[str, list[float]]:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_file(str(folder / "table.arrow")).with_format("torch")
    view = dpulr.data.Columns(table, inputs="x", target="y")
    private, values = engine(small_mlp(), view, mechanism="gradient", batch_size=BATCH, steps=STEPS), []
    for inputs, targets in private.batches():
        values += inputs[:, 0].tolist()
        private.step(inputs, targets)
    return type(private.records._store).__name__, values


def test_two_ranks_read_an_arrow_file_by_rows(tmp_path: Path) -> None:
    writer = pytest.importorskip("datasets.arrow_writer")
    datasets = pytest.importorskip("datasets")
    columns = datasets.Features({"x": datasets.Sequence(datasets.Value("float32")), "y": datasets.Value("int64")})
    with writer.ArrowWriter(path=str(tmp_path / "table.arrow"), features=columns) as file:
        for row in range(500):
            file.write({"x": [float(row), 0.0, 0.0, 1.0], "y": row % 2})
        file.finalize()
    found = on_ranks(2, tabled, tmp_path)
    assert 84 < sum(len(values) for _, values in found) < 236
    for rank, (store, values) in enumerate(found):
        assert store == "Table"
        assert {value % 2 for value in values} == {rank}
