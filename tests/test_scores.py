"""Accuracy, loss and confusion, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.errors import InvalidArgument
from dpulr.scores import score


def test_evaluate_counts_right_answers_and_leaves_the_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Identity())
    outputs = torch.eye(4).repeat(3, 1)
    data = TensorDataset(outputs, torch.tensor([0, 1, 2, 0] * 3))
    assert dpulr.evaluate(model, data, batch_size=5) == 0.75
    assert model.training
    assert dpulr.evaluate(model.eval(), data) == 0.75
    assert not model.training


def test_evaluate_refuses_a_single_output() -> None:
    """The largest of one output is always the first: an accuracy that says nothing."""
    data = TensorDataset(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match=r"outputs of shape \(4, 1\)"):
        dpulr.evaluate(nn.Linear(3, 1), data)


def test_labels_that_no_output_stands_for_are_refused() -> None:
    for labels in ([0, 1, 2, 3], [0, -1, 2, 1]):
        with pytest.raises(InvalidArgument, match=f"labels from {min(labels)} to {max(labels)}, but the model has 3 outputs"):
            dpulr.evaluate(nn.Linear(3, 3), TensorDataset(torch.randn(4, 3), torch.tensor(labels)))


def test_scores_by_hand() -> None:
    outputs = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    found = score(nn.Identity(), TensorDataset(outputs, torch.tensor([0, 1, 1, 1], dtype=torch.int32)), batch_size=3)
    assert found.confusion == ((1, 0, 0), (1, 2, 0), (0, 0, 0))
    assert found.accuracy == 0.75
    right, wrong = (-np.log(np.exp(value) / (np.exp(2) + 2)) for value in (2, 0))
    assert found.loss == pytest.approx((3 * right + wrong) / 4)
    assert [row["recall"] for row in found.classes()] == [1.0, 2 / 3, None]
    assert [row["precision"] for row in found.classes()] == [0.5, 1.0, None]
