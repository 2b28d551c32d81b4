"""Tables from CSV and Parquet files, by a public schema (`table_schema`). And a draft of such a schema, which is unprotected.

A record changes its own row alone. So every line of a CSV file is read by itself: a quote that is not closed, or bytes that are no
text, spoil one record, not those that follow. A field can't go over several lines.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpulr.data.table_schema import FROM_DATA, TableSchema, number, word
from dpulr.data.views import ArrayDataset
from dpulr.errors import DataError

KINDS = ("csv", "parquet")
_MISSING = ("", "?", "na", "n/a", "nan", "null", "none")
_FEW, _MANY = 20, 60
_PARQUET = (".parquet", ".pq")


class TableDataset(ArrayDataset):
    """A table as pairs (features, label): `inputs` (records, features), and `targets`, the place of the label in `classes`.

    A label that is a number is scaled to -1 .. 1. A record whose label is missing or no class has NaN there, and contributes
    nothing to training.
    """

    def __init__(self, schema: TableSchema, inputs: np.ndarray, targets: np.ndarray) -> None:
        super().__init__(inputs, targets)
        self.table_schema = schema
        self.features, self.classes = schema.features, list(schema.target.categories)
        self.reason_for_none = schema.reason_for_none
        label = np.int64(0) if self.classes else np.float32(0)
        self.schema = (np.zeros(inputs.shape[1], dtype=np.float32), label)

    def rows(self, start: int, stop: int | None = None) -> TableDataset:
        """The records from `start` to `stop`, as a table of their own."""
        return TableDataset(self.table_schema, self.inputs[start:stop], self.targets[start:stop])

    @property
    def labels(self) -> np.ndarray:
        """The labels themselves: words, or numbers."""
        if not self.classes:
            low, high = self.table_schema.target.low, self.table_schema.target.high
            return np.asarray(low + (self.targets.astype(np.float64) + 1) / 2 * (high - low))
        words = np.array([*self.classes, ""], dtype=object)
        return words[np.where(np.isnan(self.targets), len(self.classes), self.targets).astype(np.int64)]


def read_table(
    path: str | Path, schema: str | Path | TableSchema, label: str | None = None, kind: str | None = None
) -> TableDataset:
    """A CSV or Parquet file as a data set, by a schema of public facts (a TOML file; `dpulr data schema FILE` drafts one).

    `label` names the label's column, if the schema does not; `kind` is "csv" or "parquet", if the file's name does not tell.
    """
    about = schema if isinstance(schema, TableSchema) else TableSchema.read(schema, label)
    file = _File(path, kind)
    missing = [column.name for column in about.columns if column.name not in file.names]
    if missing:
        raise DataError(f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, file.names))}.")
    values = dict(zip([c.name for c in about.columns], file.columns([c.name for c in about.columns]), strict=True))
    inputs = np.concatenate([column.encoded(values[column.name]) for column in about.inputs], axis=1)
    target = about.target
    if not target.categories:
        numbers = target.numbers(values[target.name])
        return TableDataset(about, inputs, (2 * (numbers - target.low) / (target.high - target.low) - 1).astype(np.float32))
    places = target.places(values[target.name])
    return TableDataset(about, inputs, np.where(places < 0, np.nan, places))


class _File:
    """The columns of a file, by name."""

    def __init__(self, path: str | Path, kind: str | None = None) -> None:
        self.path = Path(path)
        self._kind = kind or ("parquet" if self.path.suffix.lower() in _PARQUET else "csv")
        if not self.path.is_file():
            raise DataError(f"there is no file {path}.")
        self.names = self._header() if self._kind == "csv" else list(_parquet(self.path).schema_arrow.names)
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise DataError(f"{path} has two columns {twice[0]!r}.")

    def columns(self, names: Sequence[str]) -> list[list[Any]]:
        if self._kind == "parquet":
            table = _parquet(self.path).read(columns=list(names))
            return [table.column(name).to_pylist() for name in names]
        places = [self.names.index(name) for name in names]
        rows = [[row[i] for i in places] if row else [None] * len(places) for row in self._rows()]
        return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in names]

    def _header(self) -> list[str]:
        with self.path.open("rb") as lines:
            names = _fields(next(lines, b"").removeprefix(b"\xef\xbb\xbf"))
        if not names or not any(names):
            raise DataError(f"{self.path} has no header: the first line names the columns.")
        return names

    def _rows(self) -> Iterator[list[str]]:
        """The fields of each record; none where their number is not that of the columns."""
        with self.path.open("rb") as lines:
            next(lines)
            for line in lines:
                if line.strip():
                    fields = _fields(line)
                    yield fields if len(fields) == len(self.names) else []


def _fields(line: bytes) -> list[str]:
    try:
        return [field.strip() for field in next(csv.reader([line.decode("utf-8", "replace").strip("\r\n")]), [])]
    except csv.Error:
        return []


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as problem:
        raise DataError("Parquet files need pyarrow: pip install 'dpulr[parquet]'.") from problem
    try:
        return parquet.ParquetFile(path)
    except Exception as problem:
        raise DataError(f"{path} is no Parquet file: {problem}") from problem


# --- a draft --------------------------------------------------------------------------------------------------------------
_HEAD = """\
# A draft of a schema for {name}, made from its records. UNPROTECTED: every value marked so tells of single records.
# Put in what everybody may know (a code book, a form, the law), then remove the lines "{from_data} = true".
# As long as one of them is left, a run with this schema has no guarantee.
"""


def draft(path: str | Path, label: str | None = None) -> str:
    """A schema in TOML, from the data. UNPROTECTED: the ranges and categories in it are those of the records."""
    file = _File(path)
    if label is not None and label not in file.names:
        raise DataError(f"{path} has no column {label!r}; it has {', '.join(map(repr, file.names))}.")
    parts = [_HEAD.format(name=file.path.name, from_data=FROM_DATA)]
    parts.append(f"label = {_quoted(label)}\n" if label else '# label = "..."   # which column is to be predicted\n')
    for name, values in zip(file.names, file.columns(file.names), strict=True):
        lines = "\n".join(_drafted(values, label=name == label))
        parts.append(f"[columns.{_quoted(name)}]\n{lines}\n")
    return "\n".join(parts)


def _drafted(values: Sequence[Any], *, label: bool) -> list[str]:
    words = Counter(text for text in map(word, values) if text.lower() not in _MISSING)
    numbers = np.array([number(text) for text in words])
    mark, marked = "   # UNPROTECTED: from the data", f"{FROM_DATA} = true"
    numeric = len(words) > 0 and not np.isnan(numbers).any() and np.ptp(numbers) > 0
    if numeric and not (label and len(words) <= _FEW):
        whole = bool((numbers == np.round(numbers)).all())
        if whole and len(words) == len(values) > _MANY:
            return [f"use = false{mark}: all its values differ, as those of a number that identifies a record do", marked]
        low, high = (
            f"{value:.0f}" if whole and abs(value) < 2**53 else repr(float(value)) for value in (min(numbers), max(numbers))
        )
        return [f"low = {low}{mark}", f"high = {high}{mark}", marked]
    if not 0 < len(words) <= _MANY:
        return [f"use = false{mark}: it has {len(words)} different values, too many or too few for categories", marked]
    return [f"categories = [{', '.join(map(_quoted, sorted(words)))}]{mark}", marked]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
