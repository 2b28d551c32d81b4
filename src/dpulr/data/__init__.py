"""Data sets as tensors. MNIST comes with the package; inputs are scaled by public constants only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

__all__ = ["load"]


def load(name: str, folder: Path | str | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set. Images are float32 of shape (channels, height, width), scaled by public constants.

    `folder` holds the files of Fashion-MNIST or CIFAR-10, if they are not where `dpulr data fetch` puts them.
    """
    from dpulr.data import catalog, cifar, idx

    entry = catalog.find(name)
    if not entry.files:
        return idx.load_mnist()
    place = catalog.place(entry) if folder is None else Path(folder)
    return cifar.load(place) if entry is catalog.CIFAR10 else idx.load(place, entry)
