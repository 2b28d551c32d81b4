"""Features from public models: computed once, record by record, kept on disk; then a private head is trained on them.

    train, test = dpulr.features.load("mnist", "scattering")
    model = dpulr.features.head(train)

A record's features depend on that record and on public weights alone, so they cost no privacy. Which public data the weights have
seen belongs beside every accuracy: `public_data`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpulr import validate
from dpulr.features.extractors import EXTRACTORS, EfficientNetLite0, Extractor, MiniLM, Scattering, extractor_of

if TYPE_CHECKING:
    from torch import nn

    from dpulr.data.views import ArrayDataset

__all__ = ["EXTRACTORS", "EfficientNetLite0", "Extractor", "MiniLM", "Scattering", "compute", "extractor_of", "head", "load"]


def load(name: str, extractor: str | Extractor, folder: Path | str | None = None) -> tuple[ArrayDataset, ArrayDataset]:
    """Features of a data set that `dpulr.data.load` knows, training and test part; on the first call they are computed.

    `folder` is where they are kept, by default beside the data sets.
    """
    from dpulr import data

    chosen = extractor_of(extractor, name)
    train, test = data.load(name)
    return compute(train, chosen, folder), compute(test, chosen, folder)


def compute(dataset: Any, extractor: str | Extractor, folder: Path | str | None = None) -> ArrayDataset:
    """Features of a data set of pairs (input, target), as a data set of pairs (features, target) that lies on disk.

    What is there, and is what its hash says, is not computed again. A stopped computation goes on where it was.
    """
    from dpulr.features import store

    return store.features_of(dataset, extractor_of(extractor), store.home() if folder is None else Path(folder))


def head(dataset: Any, classes: int | None = None) -> nn.Sequential:
    """A linear layer from features to `classes` scores (default: one more than the highest label of this data set).

    It starts at zero: where noise is added, a random start only adds more. Where labels are private, give `classes`.
    """
    import numpy as np
    from torch import nn

    from dpulr.features.extractors import ToFloat

    width = int(np.asarray(dataset[0][0]).size)
    if classes is None:
        classes = int(max(dataset.targets)) + 1
    validate.whole_number("classes", classes, 2)
    linear = nn.Linear(width, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(ToFloat(), linear)
