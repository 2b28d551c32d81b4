"""Data sets as tensors, arrays or columns. MNIST comes with the package; inputs are scaled by public constants only."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

    from dpulr.data.checking import Finding, check
    from dpulr.data.tables import TableDataset, read_table
    from dpulr.data.views import ArrayDataset, Columns

_HOME = {
    "ArrayDataset": "dpulr.data.views",
    "Columns": "dpulr.data.views",
    "Finding": "dpulr.data.checking",
    "TableDataset": "dpulr.data.tables",
    "check": "dpulr.data.checking",
    "read_table": "dpulr.data.tables",
}
__all__ = ["ArrayDataset", "Columns", "Finding", "TableDataset", "check", "load", "read_table"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpulr.data' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


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
