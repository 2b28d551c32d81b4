"""Data sets as tensors. MNIST comes with the package; inputs are scaled by public constants only."""

from __future__ import annotations

from torch.utils.data import TensorDataset

from dpulr.data.idx import load_mnist

__all__ = ["load"]


def load(name: str) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set. Images are float32 of shape (channels, height, width), scaled by public constants."""
    if name == "mnist":
        return load_mnist()
    raise ValueError(f"there is no data set {name!r}; known: 'mnist'.")
