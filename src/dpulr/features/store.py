"""Features on disk: one folder for each pair of data and extractor, found by its hash and checked by the hash of its content."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from dpulr.data import catalog
from dpulr.data.views import ArrayDataset
from dpulr.errors import DataError
from dpulr.features.extractors import Extractor
from dpulr.files import replace_json

FEATURES, TARGETS, ABOUT, PARTIAL = "features.npy", "targets.npy", "about.json", "features.part.npy"
_BLOCK = 1_000
_TOGETHER = 50


def home() -> Path:
    """Where features are kept; DPULR_DATA names another folder."""
    return catalog.folder() / "features"


def features_of(dataset: Any, extractor: Extractor, folder: Path) -> ArrayDataset:
    """The features of a data set, from disk, or computed."""
    inputs, targets = _columns(dataset)
    name = hashlib.sha256(f"{extractor.identity}\n{_digest(inputs)}\n{_digest(targets)}".encode()).hexdigest()[:16]
    place = folder / f"{extractor.name}-{name}"
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "lock"):
        if not (place / ABOUT).exists():
            _compute(inputs, targets, extractor, place)
        return _opened(place)


def _opened(place: Path) -> ArrayDataset:
    """What lies in a folder, if it is what was put there."""
    about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
    for name in (FEATURES, TARGETS):
        if not (place / name).is_file() or _file_digest(place / name) != about["sha256"][name]:
            raise DataError(f"{place / name} is damaged or missing: remove the folder {place}, and it is computed again.")
    return ArrayDataset(np.load(place / FEATURES, mmap_mode="r"), np.load(place / TARGETS))


def _compute(inputs: Sequence[Any], targets: np.ndarray, extractor: Extractor, place: Path) -> None:
    features = extractor.build()
    groups = extractor.groups(inputs)
    order = sorted(range(len(inputs)), key=lambda row: (groups[row], row))
    rows = _partial(place, len(inputs), lambda: _run(features, [inputs[order[0]]]).shape[1])
    progress = place / "progress.json"
    start = json.loads(progress.read_text(encoding="utf-8"))["rows"] if progress.exists() else 0
    for first in range(start, len(order), _BLOCK):
        block = order[first : first + _BLOCK]
        for part in _parts(block, groups):
            rows[part] = _run(features, [inputs[row] for row in part])
        rows.flush()
        replace_json(progress, {"rows": first + len(block)})
    del rows
    (place / PARTIAL).replace(place / FEATURES)
    np.save(place / TARGETS, targets)
    digests = {name: _file_digest(place / name) for name in (FEATURES, TARGETS)}
    replace_json(place / ABOUT, {"extractor": extractor.identity, "public_data": extractor.public_data, "sha256": digests})
    progress.unlink(missing_ok=True)


def _partial(place: Path, records: int, width: Callable[[], int]) -> Any:
    """The file that is being filled: the one that a stopped computation left, or a new one."""
    path = place / PARTIAL
    if path.exists() and (place / "progress.json").exists():
        return np.load(path, mmap_mode="r+")
    (place / "progress.json").unlink(missing_ok=True)
    shape = (records, width())
    needed = 2 * shape[0] * shape[1]
    if shutil.disk_usage(place).free < needed + 2**28:
        raise DataError(f"the features need {needed / 2**30:.1f} GiB, and {place} has less room. DPULR_DATA names another folder.")
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)


def _parts(block: Sequence[int], groups: Sequence[Any]) -> list[list[int]]:
    """The block in parts of one group and at most so many records."""
    parts: list[list[int]] = []
    for row in block:
        if parts and len(parts[-1]) < _TOGETHER and groups[parts[-1][0]] == groups[row]:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _run(features: Callable[[Sequence[Any]], np.ndarray], inputs: Sequence[Any]) -> np.ndarray:
    with torch.inference_mode():
        found = features(inputs)
    if found.ndim != 2 or len(found) != len(inputs):
        raise DataError(f"an extractor must return one row per record; for {len(inputs)} it returned shape {found.shape}.")
    rows: np.ndarray = np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0).clip(-6e4, 6e4).astype(np.float16)
    return rows


def _columns(dataset: Any) -> tuple[Sequence[Any], np.ndarray]:
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) == 2:
        inputs, targets = dataset.tensors
        return inputs, np.asarray(targets)  # type: ignore[return-value]
    if len(dataset) == 0:
        raise DataError("the data set is empty: there is nothing to compute features of.")
    pairs = [dataset[row] for row in range(len(dataset))]
    return [pair[0] for pair in pairs], np.asarray([pair[1] for pair in pairs])


def _digest(column: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(column, torch.Tensor):
        digest.update(f"{column.dtype} {tuple(column.shape)}".encode())
        digest.update(np.ascontiguousarray(column.numpy()).data)
    elif isinstance(column, np.ndarray):
        digest.update(f"{column.dtype} {column.shape}".encode())
        digest.update(np.ascontiguousarray(column).data)
    else:
        for item in column:
            digest.update(item.encode() if isinstance(item, str) else _digest(torch.as_tensor(item)).encode())
            digest.update(b"\x00")
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
