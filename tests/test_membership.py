"""Who a record belongs to: columns, functions and labels; what is missing; what is wrong before a record is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import dpulr
from dpulr.errors import DataError
from dpulr.membership import Membership
from tests.support.core import engine, mlp, points

ITEMS = [{"x": [1.0] * 6, "y": i % 3, "who": name} for i, name in enumerate(["ann", "bob", "ann", None, "", "cy", "bob", "ann"])]
TABLE = dpulr.data.Columns(ITEMS, inputs="x", target="y")


def test_a_column_a_function_and_labels_say_the_same() -> None:
    names = [item["who"] for item in ITEMS]
    owners = [0, 1, 0, -1, -1, 2, 1, 0]
    ways: list[Any] = [Membership.of(TABLE, "who"), Membership.of(TABLE, names), Membership.of(ITEMS, lambda item: item["who"])]
    for found in ways:
        assert found.owners.tolist() == owners
        assert (found.people, found.sizes.tolist()) == (3, [3, 2, 1])
    assert Membership.of(Subset(TABLE, [1, 5, 6]), "who").owners.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "labels", [[1, 1.0, True, math.nan, None], np.array([1, 1, 1, np.nan, np.nan]), torch.tensor([1.0, 1, 1, math.nan, math.nan])]
)
def test_labels_are_compared_as_values(labels: Any) -> None:
    assert Membership.of([0] * 5, labels).owners.tolist() == [0, 0, 0, -1, -1]


def test_a_label_that_can_t_be_read_is_missing_without_a_word() -> None:
    def who(item: int) -> Any:
        if item == 1:
            raise RuntimeError("of record 1")
        return [] if item == 2 else item  # a list can't be compared with others

    assert Membership.of([0, 1, 2, 0], who).owners.tolist() == [0, -1, -1, 0]


def test_rows_are_a_person_s_own_and_at_most_so_many() -> None:
    owners = np.repeat([0, 1, 2], [1, 5, 30])
    found, rng = Membership.of([0] * 36, owners), np.random.default_rng(0)
    counts = np.zeros(36)
    for _ in range(2_000):
        rows = found.rows(np.array([2, 0]), 3, rng)
        assert len(set(rows.tolist())) == len(rows) == 4
        assert rows[-1] == 0
        counts[rows] += 1
    assert counts[1:6].sum() == 0
    # 200 expected of each; a binomial beyond 6 deviations (84) happens once in 10^9
    assert abs(counts[6:] - 200).max() < 84


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ("sender", "no such column; it has 'x', 'y', 'who'"),
        ([1, 2], "unit has 2 labels, but the data set has 8 records"),
        (7, "unit is of type int; it must be a column's name"),
    ],
)
def test_what_is_wrong_with_unit_is_said_before_a_record_is_read(unit: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Membership.of(TABLE, unit)


def test_engines_say_it_too() -> None:
    with pytest.raises(DataError, match=r"unit is 'who', but the data set \(TensorDataset\) has no columns with names"):
        engine(mlp(), points(), unit="who")
    with pytest.raises(DataError, match="all labels are missing"):
        engine(mlp(), points(), unit=[None] * 40)
    with pytest.raises(dpulr.errors.InvalidArgument, match="max_per_person is 0"):
        engine(mlp(), points(), unit=[1] * 40, max_per_person=0)
    with pytest.raises(dpulr.errors.InvalidArgument, match="only 4 people"):
        engine(mlp(), points(), unit=np.arange(40) % 4, batch_size=5, expected_batch_size=None, sample_rate=None)


def test_the_owner_is_told_what_the_engine_does_not_tell() -> None:
    told = {finding.kind: finding for finding in dpulr.data.check(TABLE, unit="who")}
    assert told["no person"].records == 2
    assert "3 people; 1 of them have one record, and the largest share is 3" in str(told["people"])
    alone = {finding.kind: finding for finding in dpulr.data.check(points(), unit=np.arange(40))}
    assert "All have one record: unit= then says the same as leaving it out" in str(alone["people"])


def test_steps_for_records_and_for_people_have_no_common_guarantee() -> None:
    from dpulr import accounting
    from dpulr.accounting.events import Charge, GaussianRelease, SampledStep

    steps = [Charge(SampledStep(GaussianRelease(1.0), 0.1, unit=unit), 3) for unit in ("record", "person")]
    assert accounting.epsilon(steps[:1], 1e-5) == accounting.epsilon(steps[1:], 1e-5)
    assert math.isinf(accounting.epsilon(steps, 1e-5))
    spent = accounting.privacy_spent(steps, 1e-5)
    assert spent.guarantee == "none"
    assert "some steps protect records and others people" in str(spent)
