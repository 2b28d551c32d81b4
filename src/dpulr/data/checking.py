"""What is wrong with which record, for the owner of the data. UNPROTECTED: what is said here is covered by no guarantee."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.errors import ENDING, DataError, forgiven
from dpulr.membership import Membership, Unit
from dpulr.model.batches import call_model
from dpulr.records import Records
from dpulr.schema import Leaf, Misfit, Schema

_AT_ONCE, _NAMED, _LISTED = 256, 10, 20
_OF_RECORDS = {
    "unreadable": "can't be read. They contribute nothing.",
    "structure": "are nested in another way than the schema. They contribute nothing.",
    "shape": "have another shape than the schema. They contribute nothing.",
    "type": "have values that the schema's type can't hold. They contribute nothing.",
    "not finite": "have values that are NaN or infinite. They teach little or nothing.",
    "label out of range": "have a label for which the model has no output. They teach nothing.",
}
_TOO_MANY = 0.01


@dataclass(frozen=True)
class Finding:
    """`records` of the data set's `of` records are concerned; `examples` names the first of them, and says what is wrong."""

    kind: str
    records: int
    of: int
    examples: tuple[tuple[int, str], ...]
    text: str

    @property
    def share(self) -> float:
        return self.records / self.of

    def __str__(self) -> str:
        named = "; ".join(f"record {row}{': ' if text else ''}{text}" for row, text in self.examples)
        more = "; ..." if 0 < len(self.examples) < self.records else ""
        return f"{self.text} ({named}{more})" if named else self.text


@dataclass
class _Tally:
    """Records of one kind."""

    records: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add(self, row: int, text: str = "") -> None:
        self.records += 1
        if len(self.examples) < _NAMED:
            self.examples.append((row, text))


def check(dataset: Any, schema: Any = None, classes: int | None = None, unit: Unit = None) -> list[Finding]:
    """Read all records and tell what is wrong. UNPROTECTED: this is for the owner of the data, and not for publication.

    `schema` is that of `PrivacyEngine`; by default that of the first record that has one. With `classes`, the number of a model's
    outputs, labels are compared with them; with `unit`, that of `PrivacyEngine`, it is told who the records belong to. The engine
    itself tells none of this.
    """
    records = open_records(dataset, schema)
    tallies = {kind: _Tally() for kind in _OF_RECORDS}
    labels: dict[float, int] = {}
    for start in range(0, records.size, _AT_ONCE):
        rows = np.arange(start, min(start + _AT_ONCE, records.size))
        batch, kept = records.read(rows)
        for row in np.setdiff1d(rows, kept):
            kind, text = problem(records, int(row))
            tallies[kind].add(int(row), text)
        for row in kept[_not_finite(batch, len(kept))]:
            tallies["not finite"].add(int(row))
        for row, label in _labels(records.schema, batch[1], kept):
            labels[label] = labels.get(label, 0) + 1
            if isinstance(label, int) and (label < 0 or (classes is not None and label >= classes)):
                tallies["label out of range"].add(row, str(label))
    found = [_of_records(kind, tally, records.size) for kind, tally in tallies.items() if tally.records]
    return found + _of_labels(labels, classes, records.size) + ([] if unit is None else _of_people(Membership.of(dataset, unit)))


def open_records(dataset: Any, schema: Any = None) -> Records:
    """Records by the given schema, or by that of the first record that has one."""
    try:
        return Records(dataset, torch.device("cpu"), schema=schema)
    except DataError:
        if schema is not None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise
        for row in range(1, len(dataset)):
            own = None
            with forgiven:
                own = Schema.of(dataset[row])
            if own is not None:
                return Records(dataset, torch.device("cpu"), schema=own)
        raise


def outputs_of(model: nn.Module, records: Records) -> int | None:
    """How many outputs a model has for a record of zeros; None where it has no plain list of them."""
    with torch.inference_mode():
        try:
            output = call_model(model.eval(), records.example[0])
        except Exception as problem:
            raise DataError(f"the model does not take records of {records.schema}: {problem}") from problem
    return output.shape[1] if isinstance(output, Tensor) and output.dim() == 2 else None


def problem(records: Records, row: int) -> tuple[str, str]:
    """Why a record is left out, as a kind and a text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            record = records.fetch(row)
            records.schema.fitted(record)
        except Misfit as misfit:
            return misfit.kind, str(misfit)
        except ENDING:
            raise
        except BaseException as problem:
            return "unreadable", f"{type(problem).__name__}: {problem}".rstrip(": ")
    return "unreadable", "now it can be read"


def _not_finite(batch: tuple[Any, Any], size: int) -> np.ndarray:
    odd = np.zeros(size, dtype=bool)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            own = ~torch.isfinite(leaf)
            odd |= (own.flatten(1).any(1) if own.dim() > 1 else own).numpy()
    return odd


def _labels(schema: Schema, targets: Any, rows: np.ndarray) -> Iterator[tuple[int, float]]:
    """Whole numbers, or floats, where a target is one number."""
    if isinstance(schema.target, Leaf) and schema.target.shape == () and not schema.target.dtype.is_complex:
        whole = not schema.target.dtype.is_floating_point
        for row, label in zip(rows.tolist(), targets.tolist(), strict=True):
            yield row, int(label) if whole else label


def _of_records(kind: str, tally: _Tally, size: int) -> Finding:
    share = tally.records / size
    text = f"{tally.records:,} of {size:,} records ({share:.2%}) {_OF_RECORDS[kind]}"
    if share > _TOO_MANY:
        text += " WARNING: that is more than 1 in 100; clean the data first."
    return Finding(kind, tally.records, size, tuple(tally.examples), text)


def _of_people(found: Membership) -> list[Finding]:
    size, missing = len(found.owners), np.flatnonzero(found.owners < 0)
    told = []
    if len(missing):
        text = f"{len(missing):,} of {size:,} records ({len(missing) / size:.2%}) belong to nobody. They contribute nothing."
        told.append(Finding("no person", len(missing), size, tuple((int(row), "") for row in missing[:_NAMED]), text))
    if found.people:
        single = int((found.sizes == 1).sum())
        text = f"{found.people:,} people; {single:,} of them have one record, and the largest share is {int(found.sizes.max()):,}."
        if single == found.people:
            text += " All have one record: unit= then says the same as leaving it out."
        told.append(Finding("people", single, size, (), text))
    return told


def _of_labels(labels: dict[float, int], classes: int | None, size: int) -> list[Finding]:
    found = []
    if len(labels) == 1 and sum(labels.values()) > 1:
        text = f"all targets are {next(iter(labels))}: there is nothing to learn."
        found.append(Finding("constant label", sum(labels.values()), size, (), text))
    whole = {label for label in labels if isinstance(label, int) and label >= 0}
    expected = range(max(whole) + 1 if classes is None else classes) if whole else range(0)
    missing = [label for label in expected if label not in whole] if len(expected) <= 2 * len(whole) + _LISTED else []
    if missing:
        listed = ", ".join(map(str, missing[:_LISTED])) + (", ..." if len(missing) > _LISTED else "")
        found.append(Finding("missing label", 0, size, (), f"no record has label {listed}, of 0 to {expected[-1]}."))
    return found
