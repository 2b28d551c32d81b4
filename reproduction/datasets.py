"""Data sets of the studies, for `Settings.dataset` ("reproduction.datasets:mnist_unit")."""

from __future__ import annotations

import csv
import math
from importlib.resources import files

import torch
from torch.utils.data import TensorDataset

import dpulr

Pair = tuple[TensorDataset, TensorDataset]


def mnist_unit() -> Pair:
    """Pixels in [0, 1], as the paper has them."""
    return _scaled(0.1, 0.3)


def mnist_symmetric() -> Pair:
    """Pixels in [-1, 1]."""
    return _scaled(-0.8, 0.6)


def _scaled(offset: float, factor: float) -> Pair:
    """Inputs x as loaded, (pixel - 0.1) / 0.3, become offset + factor x."""
    train, test = (TensorDataset(offset + factor * part.tensors[0], part.tensors[1]) for part in dpulr.data.load("mnist"))
    return train, test


def synthetic() -> Pair:
    """A table that nobody's life depends on: 8,000 + 4,000 records of 40 features and four classes, three clusters each."""
    generator = torch.Generator().manual_seed(20)
    centres = torch.randn(4, 3, 40, generator=generator) * 0.35
    labels = torch.randint(0, 4, (12_000,), generator=generator)
    cluster = torch.randint(0, 3, (12_000,), generator=generator)
    inputs = centres[labels, cluster] + torch.randn(12_000, 40, generator=generator)
    return TensorDataset(inputs[:8_000], labels[:8_000]), TensorDataset(inputs[8_000:], labels[8_000:])


_CODES = {  # the answers that the census form allows: public, whoever has answered
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    "marital-status": ("Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"),
    "occupation": (
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners Machine-op-inspct "
        "Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces"
    ),
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "gender": "Female Male",
}
_RANGES = {"age": (17, 90), "education-num": (1, 16), "hours-per-week": (1, 99)}


def adult() -> Pair:
    """Adult census (package xai): 26,000 + 6,561 people, income above 50,000 or not.

    Numbers are scaled by the ranges of the form, gains and losses by their logarithm, answers are one-hot: nothing is measured on
    the data. Every fifth record is for testing.
    """
    with files("xai").joinpath("data", "census.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = [[(float(row[name]) - low) / (high - low) * 2 - 1 for row in rows] for name, (low, high) in _RANGES.items()]
    columns += [[math.log1p(float(row[name])) / 5 for row in rows] for name in ("capital-gain", "capital-loss")]
    columns += [[float(row[name].strip() == code) for row in rows] for name, codes in _CODES.items() for code in codes.split()]
    inputs = torch.tensor(columns, dtype=torch.float32).t().contiguous()
    labels = torch.tensor([int(">" in row["loan"]) for row in rows])
    test = torch.arange(len(rows)) % 5 == 0
    return TensorDataset(inputs[~test], labels[~test]), TensorDataset(inputs[test], labels[test])
