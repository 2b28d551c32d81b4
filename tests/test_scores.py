"""Accuracy, loss and confusion, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.errors import DataError, InvalidArgument
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


def test_outputs_that_are_not_finite_are_refused() -> None:
    """The largest of NaN is the first: an accuracy that says nothing."""
    outputs = torch.eye(3).repeat(4, 1)
    outputs[5, 1] = torch.nan
    data = TensorDataset(outputs, torch.arange(12) % 3)
    with pytest.raises(DataError, match=r"at least 1 of 12 records are not finite. So are inputs: dpulr.data.check tells which"):
        dpulr.evaluate(nn.Identity(), data)
    diverged = nn.Linear(3, 3)
    nn.init.constant_(diverged.weight, torch.inf)
    with pytest.raises(DataError, match="The model has diverged"):
        dpulr.evaluate(diverged, TensorDataset(torch.ones(2, 3), torch.tensor([0, 1])))


def test_a_record_that_cannot_be_read_is_named() -> None:
    """What is evaluated on is not private, and an accuracy on the readable ones would say nothing."""
    data = [(torch.zeros(3), 0), (torch.zeros(4), 0)]
    with pytest.raises(DataError, match=r"record 1 of the data to evaluate on can't be used: value 1 of 2 has shape \(4,\)"):
        dpulr.evaluate(nn.Linear(3, 3), data)


def test_targets_that_are_no_labels_are_described() -> None:
    with pytest.raises(InvalidArgument, match=r"whole number; got outputs of shape \(4, 3\) and targets that are torch.float32"):
        dpulr.evaluate(nn.Linear(3, 3), TensorDataset(torch.zeros(4, 3), torch.zeros(4)))


def test_calibration_by_hand() -> None:
    """Four records with two confidences: 0.9 and right once in two, 0.6 and right always."""
    outputs = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.6, 0.4], [0.6, 0.4]]).log()
    found = score(nn.Identity(), TensorDataset(outputs, torch.tensor([0, 0, 0, 0])), batch_size=3)
    assert found.calibration_error == pytest.approx((abs(1.8 - 1) + abs(1.2 - 2)) / 4)
    assert found.brier == pytest.approx((2 * 0.1**2 + 2 * 0.9**2 + 2 * 2 * 0.4**2) / 4)


def test_calibration_at_the_ends_of_the_bins() -> None:
    """Certain answers fall into the last bin; their calibration error is the share of wrong ones."""
    outputs = 1000 * torch.eye(3)[[0, 1, 2, 2]]
    found = score(nn.Identity(), TensorDataset(outputs, torch.tensor([0, 1, 2, 0])))
    assert found.calibration_error == pytest.approx(0.25) == 1 - found.accuracy
    assert found.figures()["test_calibration_error"] == found.calibration_error
