"""The owner of the data is told what is wrong with which record; every line is marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpulr.data import ArrayDataset, check
from dpulr.errors import DataError
from tests.support.small_cli import Ended


class Files:
    """Records of which some are odd."""

    def __init__(self, odd: dict[int, Any], size: int = 300) -> None:
        self.odd, self.size = odd, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Any:
        item = self.odd.get(row, (torch.full((3,), float(row)), row % 3))
        if isinstance(item, Exception):
            raise item
        return item


def odd_files() -> Files:
    return Files(
        {
            7: OSError("cannot identify image file '7.png'"),
            8: (torch.zeros(4), 1),
            9: (torch.zeros(3), 1.5),
            10: (torch.tensor([0.0, torch.nan, 0.0]), 1),
            270: (torch.tensor([0.0, torch.inf, 0.0]), 1),
            11: (torch.zeros(3), -1),
            12: (torch.zeros(3), 5),
            13: ({"x": 1}, 1),
        }
    )


def test_every_kind_is_found_with_its_record() -> None:
    found = {finding.kind: finding for finding in check(odd_files(), classes=4)}
    named = {kind: [row for row, _ in finding.examples] for kind, finding in found.items()}
    assert named == {
        "unreadable": [7],
        "shape": [8],
        "type": [9, 13],
        "not finite": [10, 270],
        "label out of range": [11, 12],
        "missing label": [],
    }
    assert "OSError: cannot identify image file '7.png'" in str(found["unreadable"])
    assert "value 1 of 2 has shape (4,) instead of (3,)" in str(found["shape"])
    assert "value 2 of 2 is float64 and has values that int64 can't hold" in str(found["type"])
    assert "record 11: -1; record 12: 5" in str(found["label out of range"])
    assert found["missing label"].text == "no record has label 3, of 0 to 3."
    assert found["not finite"].share == 2 / 300
    assert "WARNING" not in found["not finite"].text


def test_more_than_one_in_a_hundred_is_a_warning() -> None:
    x, y = torch.zeros(200, 2), torch.arange(200) % 2
    x[:3] = torch.nan
    for data in (TensorDataset(x, y), ArrayDataset(x.numpy(), y.numpy())):
        (finding,) = check(data)
        assert finding.records == 3
        assert "3 of 200 records (1.50%)" in finding.text
        assert "WARNING: that is more than 1 in 100" in finding.text


def test_labels() -> None:
    x = torch.zeros(50, 2)
    assert check(TensorDataset(x, torch.arange(50) % 3)) == []
    assert check(TensorDataset(x, torch.arange(50.0))) == []
    assert check(TensorDataset(x, torch.zeros(50, 4))) == []
    assert [finding.kind for finding in check(TensorDataset(x, torch.full((50,), 0.5)))] == ["constant label"]
    found = check(TensorDataset(x, torch.ones(50, dtype=torch.int64)))
    assert [finding.text for finding in found] == [
        "all targets are 1: there is nothing to learn.",
        "no record has label 0, of 0 to 1.",
    ]
    with np.errstate(all="raise"):
        assert check(TensorDataset(x, torch.arange(50) + 10**12)) == []  # numbers, not classes


def test_the_first_good_record_gives_the_schema() -> None:
    odd: dict[int, Any] = {0: OSError("gone"), 1: "text"}
    assert [finding.kind for finding in check(Files(odd))] == ["unreadable", "structure"]
    with pytest.raises(DataError, match="first record"):
        check(Files({row: OSError() for row in range(300)}))
    (finding,) = check(Files({}), schema=(torch.zeros(2), 0))
    assert (finding.kind, finding.records, len(finding.examples)) == ("shape", 300, 10)
    assert str(finding).endswith("; ...)")


def job() -> tuple[Any, Any]:
    return odd_files(), Files({})


def four_outputs() -> nn.Module:
    return nn.Linear(3, 4)


def test_the_command_marks_every_line(run_cli: Callable[..., Ended]) -> None:
    name = f"{__name__}:job"
    ended = run_cli("data", "check", name, "--model", f"{__name__}:four_outputs")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert all(line.startswith("UNPROTECTED") for line in lines)
    assert "UNPROTECTED train: 300 records, float32 of shape (3,) and int64 of shape ()" in lines
    assert any("7.png" in line for line in lines)
    assert any("record 12: 5" in line for line in lines)
    shown = json.loads(run_cli("data", "check", name, "--json").out)
    assert shown["unprotected"] is True
    assert [finding["kind"] for finding in shown["test"]["findings"]] == []
    assert shown["train"]["findings"][0]["examples"][0][0] == 7
    assert run_cli("data", "check", "letters").code == 2
    assert run_cli("data", "check", name, "--model", "mlp").code == 2
