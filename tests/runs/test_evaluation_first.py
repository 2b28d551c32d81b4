"""A test part that can't be evaluated fails before the first charge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support import small_job
from tests.support.small_cli import SMALL, Ended

NAN = TensorDataset(torch.full((8, 6), torch.nan), torch.zeros(8, dtype=torch.int64))
PARTS: dict[str, tuple[Any, str]] = {
    "regression": (TensorDataset(torch.zeros(8, 6), torch.zeros(8, 1)), "whole number; got outputs of shape"),
    "labels": (TensorDataset(torch.zeros(8, 6), torch.full((8,), 7)), "labels from 7 to 7"),
    "features": (TensorDataset(torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64)), "RuntimeError"),
    "nan": (NAN, "not finite"),
    "unreadable": ([(torch.zeros(6), 0), "text"], "record 1 of the data to evaluate on can't be used"),
}
TEST_PART: list[Any] = []


def data() -> Any:
    return small_job.data()[0], TEST_PART[0]


@pytest.mark.parametrize("name", PARTS)
def test_nothing_is_charged(name: str, tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    part, message = PARTS[name]
    TEST_PART[:] = [part]
    folder = tmp_path / "run"
    ended = run_cli("train", *SMALL, "--dataset", f"{__name__}:data", "--steps", 12, "--out", folder)
    assert ended.code == 2
    assert "the test part can't be evaluated, and nothing was charged" in ended.err
    assert message in ended.err
    assert not folder.exists()


def test_a_missing_test_part_is_named(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    TEST_PART[:] = [None]
    ended = run_cli("train", *SMALL, "--dataset", f"{__name__}:data", "--steps", 12, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "has no test part. Give --test FILE" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nor_by_resume(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    TEST_PART[:] = [small_job.data()[1]]
    folder = tmp_path / "run"
    assert run_cli("train", *SMALL, "--dataset", f"{__name__}:data", "--steps", 12, "--out", folder).code == 0
    TEST_PART[:] = [NAN]
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    ended = run_cli("resume", folder, "--target-epsilon", 3)
    assert ended.code == 2, ended.err
    assert "nothing was charged" in ended.err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
