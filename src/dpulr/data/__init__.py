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
    from dpulr.data import catalog

    entry = catalog.find(name)
    if entry.name == "mnist":
        from dpulr.data.idx import load_mnist

        return load_mnist()
    place = catalog.place(entry) if folder is None else Path(folder)
    if entry.name == "cifar10":
        from dpulr.data.cifar import load_cifar

        return load_cifar(place)
    from dpulr.data.idx import load_folder

    return load_folder(place, entry.files)
