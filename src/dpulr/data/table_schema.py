"""What everybody may know of a table: which columns it has, their ranges and their categories. Written in TOML, by hand.

    label = "income"

    [columns.age]
    low = 0
    high = 100

    [columns.work]
    categories = ["private", "public", "none"]

Numbers come out between -1 and 1, one feature each; `scale = "log"` spreads the small ones, `bins = [20, 30, 40]` makes a feature
of every interval instead. A category is a feature that is 1 or 0. What lies outside the range is moved to its end. A missing or
unknown value is 0 in all features of its column. Columns that the schema does not name, or that have `use = false`, are not read.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dpulr.errors import DataError

FROM_DATA = "from_data"
_KEYS = ("low", "high", "scale", "bins", "categories", "use", FROM_DATA)


@dataclass(frozen=True)
class Column:
    """One column: a number with its range, or a list of categories."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    bins: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()

    @property
    def features(self) -> list[str]:
        if self.categories:
            return [f"{self.name}={category}" for category in self.categories]
        if not self.bins:
            return [self.name]
        ends = [self.low, *self.bins, self.high]
        return [f"{self.name} {a:g} to {b:g}" for a, b in pairwise(ends)]

    def encoded(self, values: Sequence[Any]) -> np.ndarray:
        """(records, features). Each value alone decides on its row."""
        if self.categories:
            return _one_hot(self.places(values), len(self.categories))
        numbers = self.numbers(values)
        if self.bins:
            return _one_hot(np.where(np.isnan(numbers), -1, np.searchsorted(self.bins, numbers, side="right")), len(self.bins) + 1)
        place = (numbers - self.low) / (self.high - self.low)
        if self.log:
            place = np.log1p(numbers - self.low) / math.log1p(self.high - self.low)
        return np.asarray(np.nan_to_num(2 * place - 1)[:, None], dtype=np.float32)

    def numbers(self, values: Sequence[Any]) -> np.ndarray:
        """Moved into the range; NaN where there is none."""
        numbers = np.array([number(value) for value in values], dtype=np.float64)
        return np.clip(numbers, self.low, self.high)

    def places(self, values: Sequence[Any]) -> np.ndarray:
        """Which category each value is; -1 where it is none."""
        place = {category: i for i, category in enumerate(self.categories)}
        return np.array([place.get(word(value), -1) for value in values], dtype=np.int64)


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table that are used, and which of them is the label."""

    columns: tuple[Column, ...]
    label: str
    drafted: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | Path, label: str | None = None) -> TableSchema:
        """From a TOML file. `label` names the label's column, if the file does not, or another one."""
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as problem:
            raise DataError(f"the schema {path} can't be read: {problem.strerror or problem}.") from problem
        except ValueError as problem:
            raise DataError(f"the schema {path} is no valid TOML: {problem}.") from problem
        return cls.of(values, label)

    @classmethod
    def of(cls, values: Mapping[str, Any], label: str | None = None) -> TableSchema:
        """From what a TOML file holds."""
        odd = sorted(set(values) - {"label", "columns"})
        tables = values.get("columns")
        if odd or not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            more = f"; there is no {odd[0]!r}" if odd else ""
            raise DataError(f"a schema has a label and tables [columns.NAME], one for each column{more}.")
        label = label or values.get("label")
        if not isinstance(label, str):
            raise DataError("which column is the label? Say label = NAME in the schema, or give --label.")
        used = {name: table for name, table in tables.items() if table.get("use", True) or name == label}
        if label not in used:
            raise DataError(f"the schema has no [columns.{label}], which is the label's.")
        if len(used) == 1:
            raise DataError("the schema has no column but the label's.")
        drafted = tuple(name for name, table in tables.items() if _is_drafted(name, table))
        return cls(tuple(_column(name, table) for name, table in used.items()), label, drafted)

    @property
    def target(self) -> Column:
        return next(column for column in self.columns if column.name == self.label)

    @property
    def inputs(self) -> list[Column]:
        return [column for column in self.columns if column.name != self.label]

    @property
    def features(self) -> list[str]:
        return [feature for column in self.inputs for feature in column.features]

    @property
    def reason_for_none(self) -> str | None:
        """Why there is no guarantee, if the data decided on the schema."""
        if not self.drafted:
            return None
        names, more = self.drafted[:5], len(self.drafted) - 5
        listed = ", ".join(name or '""' for name in names) + (f" and {more} more" if more > 0 else "")
        return (
            f"the schema was drafted from the data: for {listed} it still says {FROM_DATA} = true. Put in what everybody may know, "
            "and remove that line"
        )


def number(value: Any) -> float:
    """NaN for what is no finite number."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def word(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _one_hot(places: np.ndarray, width: int) -> np.ndarray:
    found = np.zeros((len(places), width), dtype=np.float32)
    known = np.flatnonzero(places >= 0)
    found[known, places[known]] = 1
    return found


# --- reading a schema -----------------------------------------------------------------------------------------------------
def _column(name: str, table: Mapping[str, Any]) -> Column:
    odd = sorted(set(table) - set(_KEYS))
    if odd:
        raise DataError(f"[columns.{name}] has {odd[0]!r}; it may have {', '.join(_KEYS)}.")
    if "categories" in table:
        if set(table) - {"categories", "use", FROM_DATA}:
            raise DataError(f"[columns.{name}] has categories and a range; it must be one of the two.")
        words = tuple(word(value) for value in table["categories"]) if isinstance(table["categories"], list) else ()
        if not words or len(set(words)) < len(words):
            raise DataError(f"[columns.{name}]: categories must be a list of different words.")
        return Column(name, categories=words)
    low, high = (number(table.get(end)) for end in ("low", "high"))
    if not low < high:
        raise DataError(f"[columns.{name}] needs low and high, two numbers, low below high; or categories, a list of words.")
    scale, bins = table.get("scale", "linear"), table.get("bins", [])
    if scale not in ("linear", "log"):
        raise DataError(f"[columns.{name}]: scale is {scale!r}; it must be 'linear' or 'log'.")
    edges = tuple(number(edge) for edge in bins) if isinstance(bins, list) else (math.nan,)
    if not all(a < b for a, b in zip((low, *edges), (*edges, high), strict=True)):
        raise DataError(f"[columns.{name}]: bins must be a list of numbers that rise, between low and high.")
    return Column(name, low=low, high=high, log=scale == "log", bins=edges)


def _is_drafted(name: str, table: Mapping[str, Any]) -> bool:
    drafted = table.get(FROM_DATA, False)
    if not isinstance(drafted, bool):
        raise DataError(f"[columns.{name}]: {FROM_DATA} must be true or false.")
    return drafted
