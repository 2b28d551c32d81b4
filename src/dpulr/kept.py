"""`keep_frozen`: frozen layers before the first trained one, computed once per record and kept; a step runs from there.

What is kept of a record is computed of that record and of public weights alone, to the last bit: passes have one size, which was
tried on synthetic records (model/row_sizes.py), or each record has a pass of its own. So it costs no privacy, and one record more
or less changes nothing that is kept of others. What is kept is as private as the record itself. Nothing is said of any record: one
that can't be read, or whose pass raises, has NaN for all its values, and contributes nothing. (Whole numbers know no NaN: where
nothing else is kept, it has zeros, and counts as a record of these.)
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr import validate
from dpulr.data.views import ArrayDataset
from dpulr.errors import DataError, InvalidArgument, ModelRefused
from dpulr.files import replace_json
from dpulr.model.black_box import stand_ins
from dpulr.model.each_record import EachRecord, row_sums
from dpulr.model.frozen_prefix import cut
from dpulr.model.opaque import uncompiled, without_compiling
from dpulr.model.scratch import equal_bits
from dpulr.model.value_reads import observe
from dpulr.parts.computing import exact_arithmetic
from dpulr.randomness import RandomSource
from dpulr.records import Records
from dpulr.schema import Leaf

_READ_AT_ONCE, _LOOKED_AT, _READINGS = 128, 8, 3
_ABOUT = "about.json"


def keep_frozen(model: nn.Module, dataset: Any, *, path: str | Path | None = None, limit: int = 2**31, schema: Any = None) -> Kept:
    """Compute what lies before the first trained layer (`requires_grad`) once for every record, and keep it.

        kept = dpulr.keep_frozen(model, train)
        engine = dpulr.PrivacyEngine(kept.model, optimizer, kept.dataset, loss_fn, ...)

    It is kept in memory, at most `limit` bytes, or in files of the folder `path`, from which rows are read as they are needed; what
    lies there already, of the same weights and records, is not computed again. Refused are frozen layers that draw random numbers
    (call `model.eval()`), and data sets whose items change from one reading to the next, as augmented ones do.
    """
    validate.whole_number("limit", limit)
    return Kept(model, dataset, None if path is None else Path(path), limit, schema)


class Kept:
    """A model in two parts, and records as they leave the first.

    model    the rest: it calls the very layers of the model that was given, so that training it trains that model
    dataset  what is kept, with the targets: what the rest is trained on
    """

    def __init__(self, model: nn.Module, dataset: Any, path: Path | None, limit: int, schema: Any) -> None:
        model = uncompiled(model)
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._limit, self._source = limit, RandomSource()
        records = Records(dataset, self._device, schema)
        self._schema = records.schema
        with warnings.catch_warnings(action="ignore"), without_compiling(model):
            self._prefix, self.model = cut(model, records.example, self._device)
            with exact_arithmetic(self._device):
                self._try(records.example)
        if self._each.size == 1:
            warnings.warn(
                "computing the frozen layers record by record, which is slow, because no number of rows was found with which they "
                "give a record the same last bits wherever its row stands (docs/pitfalls.md)",
                stacklevel=3,
            )
        self.dataset = self._kept(records, path)

    def also(self, dataset: Any, *, path: str | Path | None = None) -> ArrayDataset:
        """The same of other records, of a test set for example."""
        if self._modes != [module.training for module in self._prefix.modules()]:
            raise InvalidArgument("the model is in another mode (training or not) than when its layers were computed first.")
        return self._kept(Records(dataset, self._device, self._schema), None if path is None else Path(path))

    # --- once, on synthetic records ---------------------------------------------------------------------------------------
    def _try(self, example: tuple[Any, Any]) -> None:
        """What the prefix must be so that its rows can be kept; and how many rows a pass has."""
        with stand_ins(self._prefix) as boxes:
            seen = observe(self._prefix, row_sums, example, self._device)
            if seen.draws or boxes:
                raise ModelRefused(
                    "the frozen layers draw random numbers (dropout in training mode, say), so that they can't be computed once: "
                    "call model.eval() before."
                )
            self._each = EachRecord(self._prefix, example, self._device, seen)
            self._modes = [module.training for module in self._prefix.modules()]
            with torch.inference_mode():
                columns = self._each.outputs(self._each.nobody)
                self._columns = [(column.dtype, tuple(column.shape[1:])) for column in columns]

    # --- per record -------------------------------------------------------------------------------------------------------
    def _fill(self, columns: list[np.ndarray], places: np.ndarray, batch: tuple[Any, Any]) -> None:
        nan = [torch.full((1, *shape), math.nan if dtype.is_floating_point else 0, dtype=dtype) for dtype, shape in self._columns]
        sizes = [_bytes(column).shape[1] for column in nan]
        missing = torch.cat([_bytes(column) for column in nan], dim=1).to(self._device)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # what a model warns of depends on records
            stack.enter_context(without_compiling(self._prefix))
            stack.enter_context(exact_arithmetic(self._device))
            stack.enter_context(self._source.model_randomness(self._device))
            found = self._each.rows(_packed, batch, missing).cpu()
        for column, own, (dtype, shape) in zip(columns, torch.split(found, sizes, dim=1), self._columns, strict=True):
            column[places] = own.contiguous().view(dtype).view(-1, *shape).numpy()

    # --- all of them ------------------------------------------------------------------------------------------------------
    def _kept(self, records: Records, path: Path | None) -> ArrayDataset:
        self._check_same(records)
        if path is not None:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with nullcontext() if path is None else FileLock(path / "lock"):
            return self._computed(records, path)

    def _computed(self, records: Records, path: Path | None) -> ArrayDataset:
        identity = "" if path is None else self._identity(records)
        columns = None if path is None else _found(path, identity, len(self._columns))
        known = columns is not None
        columns = columns or self._empty(records.size, path)
        targets = [np.zeros((records.size, *leaf.shape), dtype=_numpy(leaf.dtype)) for leaf in _leaves(self._schema.target, Leaf)]
        for asked, places, batch in self._read(records):
            for target, values in zip(targets, _leaves(batch[1], Tensor), strict=True):
                target[places] = values.cpu().numpy()
            if not known:
                for column in columns:
                    column[asked] = math.nan if column.dtype.kind == "f" else 0
                self._fill(columns, places, batch)
        if path is not None and not known:
            for column in columns:
                column.flush()  # type: ignore[attr-defined]
            replace_json(path / _ABOUT, {"identity": identity})
        rest = iter(targets)
        own = pytree.tree_map(lambda _: next(rest), self._schema.target, is_leaf=lambda leaf: isinstance(leaf, Leaf))
        made = ArrayDataset(columns[0] if len(columns) == 1 else tuple(columns), own)
        made.reason_for_none = records.reason_for_none
        return made

    def _read(self, records: Records) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[Any, Any]]]:
        """Rows that were asked for, those that could be read, and these as a batch."""
        for start in range(0, records.size, _READ_AT_ONCE):
            asked = np.arange(start, min(start + _READ_AT_ONCE, records.size))
            with self._source.reading_randomness() if records.runs_user_code else nullcontext():
                batch, places = records.read(asked)
            yield asked, places, batch

    def _empty(self, size: int, path: Path | None) -> list[np.ndarray]:
        """Arrays to be filled, in memory or in files."""
        needed = size * sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._columns)
        if path is None:
            if needed > self._limit:
                raise InvalidArgument(
                    f"what is kept of {size:,} records takes {needed / 2**30:.2f} GiB, more than limit={self._limit:,} bytes. "
                    "Give a folder, path=, a larger limit=, or train on the data set as it is."
                )
            return [np.empty((size, *shape), dtype=_numpy(dtype)) for dtype, shape in self._columns]
        (path / _ABOUT).unlink(missing_ok=True)
        if shutil.disk_usage(path).free < needed + 2**28:
            raise InvalidArgument(f"what is kept takes {needed / 2**30:.2f} GiB, and {path} has less room.")
        return [
            np.lib.format.open_memmap(path / f"{i}.npy", mode="w+", dtype=_numpy(dtype), shape=(size, *shape))
            for i, (dtype, shape) in enumerate(self._columns)
        ]

    def _identity(self, records: Records) -> str:
        """A hash of all that decides what is kept: the frozen layers as a program, their weights, the records."""
        digest = hashlib.sha256(f"{torch.__version__} {self._prefix.code} {self._prefix}".encode())
        for values in self._prefix.state_dict(keep_vars=True).values():
            digest.update(_bytes(values.detach().unsqueeze(0).cpu()).numpy().data)
        for asked, places, batch in self._read(records):
            digest.update(asked.tobytes() + places.tobytes())
            for values in _leaves(batch, Tensor):
                digest.update(_bytes(values.cpu()).numpy().data)
        return digest.hexdigest()

    def _check_same(self, records: Records) -> None:
        """Items must be the same whenever they are read. Whether they are is a matter of the data set's code, taken as public."""
        if not records.runs_user_code:
            return
        some = np.arange(min(_LOOKED_AT, records.size))
        before = _states()
        first, *others = [records.read(some) for _ in range(_READINGS)]
        same = all(
            np.array_equal(first[1], places)
            and all(equal_bits(a, b) for a, b in zip(_leaves(first[0], Tensor), _leaves(batch, Tensor), strict=True))
            for batch, places in others
        )
        if not same or _states() != before:
            raise DataError(
                f"the items of the data set ({type(records.dataset).__name__}) change from one reading to the next, or draw random "
                "numbers, as augmented ones do: frozen layers can't be computed once. Leave keep_frozen out, or the augmentation."
            )


def _found(path: Path, identity: str, columns: int) -> list[np.ndarray] | None:
    """What lies in a folder, if it is of the same weights and records."""
    about = path / _ABOUT
    if not about.is_file() or json.loads(about.read_text(encoding="utf-8")).get("identity") != identity:
        return None
    return [np.load(path / f"{i}.npy", mmap_mode="r") for i in range(columns)]


def _states() -> tuple[bytes, str, int]:
    """Where the global generators are."""
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), hash(random.getstate())


def _leaves(tree: Any, kind: type[Any]) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, kind)) if isinstance(leaf, kind)]


def _packed(columns: tuple[Tensor, ...]) -> Tensor:
    """(records, bytes): all that is kept of each record."""
    return torch.cat([_bytes(column) for column in columns], dim=1)


def _bytes(column: Tensor) -> Tensor:
    """(records, bytes)."""
    return column.contiguous().reshape(len(column), -1).view(torch.uint8)


def _numpy(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as problem:
        raise ModelRefused(f"the frozen layers give values of type {dtype}, which can't be kept.") from problem
