"""Texts of a CSV or Parquet file as numbers, by the tokenizer of a model's folder: `dpulr train --text COLUMN --model hf:PATH`.

A text becomes as many numbers as every other one, a public length: longer ones are cut, shorter ones padded. So no shape tells
how long a record's text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpulr import validate
from dpulr.data.tables import _File
from dpulr.data.views import ArrayDataset
from dpulr.errors import DataError, UsageError

_TOGETHER = 1_000


class TextDataset(ArrayDataset):
    """Pairs (tokens, label): `inputs` (records, 2, length) are the tokens' numbers, and 1 where there is one, 0 for padding.

    A record whose line is broken, or whose label is none of `classes`, has NaN for a label, and contributes nothing to training.
    """

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, classes: Sequence[str]) -> None:
        super().__init__(inputs, targets)
        self.classes = list(classes)
        self.schema = (np.zeros(inputs.shape[1:], dtype=np.int64), np.int64(0))

    def rows(self, rows: slice | np.ndarray) -> TextDataset:
        """These records, as a data set of their own."""
        return TextDataset(self.inputs[rows], self.targets[rows], self.classes)


def read_texts(
    path: str | Path, *, text: str, label: str, classes: Sequence[str], tokenizer: Any, length: int = 128
) -> TextDataset:
    """A file's texts and labels. `classes` are the words or numbers that labels may be; they and `length` are public."""
    validate.whole_number("tokens", length, 3)
    if len(set(classes)) < 2 or len(set(classes)) < len(classes):
        raise DataError(f"the labels are {', '.join(map(repr, classes))}; they must be at least two different ones.")
    file = _File(path)
    for column in (text, label):
        if column not in file.names:
            raise DataError(f"{path} has no column {column!r}; it has {', '.join(map(repr, file.names))}.")
    texts, labels = file.columns([text, label])
    if not texts:
        raise DataError(f"{path} has no records.")
    places = {word: float(i) for i, word in enumerate(classes)}
    targets = np.array([places.get(_word(word), np.nan) for word in labels])
    return TextDataset(encoded(texts, tokenizer, length), targets, classes)


def encoded(texts: Sequence[Any], tokenizer: Any, length: int) -> np.ndarray:
    """(records, 2, length) whole numbers. Each text is encoded by itself; an empty one is what the tokenizer makes of it."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    out = np.zeros((len(texts), 2, length), dtype=np.int64)
    out[:, 0] = tokenizer.pad_token_id or 0
    for start in range(0, len(texts), _TOGETHER):
        some = [text if isinstance(text, str) else "" for text in texts[start : start + _TOGETHER]]
        for row, numbers in zip(out[start:], tokenizer(some, truncation=True, max_length=length)["input_ids"], strict=False):
            kept = numbers or [tokenizer.pad_token_id or 0]  # of nothing, some tokenizers make nothing: padding, but seen
            row[0, : len(kept)], row[1, : len(kept)] = kept, 1
    return out


def _word(value: Any) -> str:
    """A label as a word: 1, 1.0 and "1" are the same."""
    text = "" if value is None else str(value).strip()
    return text[:-2] if text.endswith(".0") and text[:-2].lstrip("-").isdigit() else text


def tokenizer_of(folder: str | Path) -> Any:
    """The tokenizer of a model's folder."""
    if not Path(folder).is_dir():
        raise UsageError(f"there is no folder {folder}: hf: takes a model's folder, with config.json, weights and a tokenizer.")
    try:
        from transformers import AutoTokenizer
    except ImportError as problem:
        raise UsageError("hf: needs transformers: pip install 'dpulr[text]'.") from problem
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as problem:
        raise UsageError(f"{folder} has no tokenizer that can be read: {_first_line(problem)}") from problem


def _first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n", 1)[0]
