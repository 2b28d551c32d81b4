"""Data sets of the studies, for `Settings.dataset` ("reproduction.datasets:mnist_unit")."""

from __future__ import annotations

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
