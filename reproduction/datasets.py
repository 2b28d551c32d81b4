"""MNIST with other scales of its inputs, for `Settings.dataset` ("reproduction.datasets:mnist_unit")."""

from __future__ import annotations

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
