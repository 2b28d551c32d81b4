"""MNIST's file format (idx): a header with the shape, then bytes."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpulr.data import catalog
from dpulr.data.catalog import Entry
from dpulr.errors import DataError

_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def load_mnist() -> tuple[TensorDataset, TensorDataset]:
    """The 60,000 training and 10,000 test images that lie in the package, checked by MD5."""
    return _part("train"), _part("t10k")


def load(folder: Path, entry: Entry) -> tuple[TensorDataset, TensorDataset]:
    """Fashion-MNIST from a folder with its four idx files, plain or packed, each checked."""
    parts = {name: parse(read_file(folder, entry, name), name) for name in entry.files}

    def part(prefix: str) -> TensorDataset:
        images = parts[f"{prefix}-images-idx3-ubyte"].unsqueeze(1)
        return TensorDataset(scaled(images), parts[f"{prefix}-labels-idx1-ubyte"].long())

    return part("train"), part("t10k")


def read_file(folder: Path, entry: Entry, name: str) -> bytes:
    """The unpacked bytes of one file, checked."""
    path = catalog.locate(folder, name)
    if path is None:
        raise DataError(f"there is no {name} in {folder}.")
    raw = path.read_bytes()
    return catalog.verify(unpacked(raw, path) if path.suffix == ".gz" else raw, entry, name, path)


def unpacked(raw: bytes, where: Path | str) -> bytes:
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{where} is damaged: {problem}.") from problem


def _part(prefix: str) -> TensorDataset:
    images = _read(f"{prefix}-images-idx3-ubyte.gz").unsqueeze(1)
    labels = _read(f"{prefix}-labels-idx1-ubyte.gz")
    return TensorDataset(scaled(images), labels.long())


def scaled(images: Tensor) -> Tensor:
    """Bytes 0..255 as float32 from -1/3 (paper) to 3 (ink): fixed numbers, not measured on the data."""
    return images.float().div_(255).sub_(0.1).div_(0.3)


def _read(name: str) -> Tensor:
    packed = files("dpulr.data").joinpath("mnist", name).read_bytes()
    if hashlib.md5(packed).hexdigest() != _MD5[name]:
        raise DataError(f"the file {name} of the package is damaged: its MD5 is not {_MD5[name]}. Install dpulr again.")
    return parse(gzip.decompress(packed), name)


def parse(raw: bytes, name: str) -> Tensor:
    """The array in an idx file of unsigned bytes."""
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"{name} is not an idx file of bytes.")
    axes = raw[3]
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * axes)
    if values.size != np.prod(shape):
        raise DataError(f"{name} should hold {shape} bytes and holds {values.size}.")
    return torch.from_numpy(values.reshape(shape).copy())
