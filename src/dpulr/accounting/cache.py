"""Slow results kept on disk, in the user's cache folder. DPULR_CACHE=off turns it off; else it names another folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

VERSION = 2  # of the files' format
WORTH_KEEPING_SECONDS = 0.2


def folder() -> Path | None:
    """Where results are kept; None if caching is off."""
    setting = os.environ.get("DPULR_CACHE", "")
    if setting.lower() in ("off", "0", "no"):
        return None
    if setting:
        return Path(setting)
    import platformdirs

    return Path(platformdirs.user_cache_dir("dpulr", appauthor=False)) / f"accounting-{VERSION}"


@lru_cache(maxsize=1)
def sources() -> str:
    """A hash of all code that a number depends on: no result of another version is found. It takes a millisecond."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in (*sorted(package.glob("accounting/*.py")), package / "paper" / "nominal.py", package / "search.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def remember(kind: str, key: Mapping[str, Any], compute: Callable[[], float]) -> float:
    """The stored value for (kind, key), or compute() and, if that was slow, store it. A damaged file is ignored.

    Whoever can write to the folder can put any value there: a printed epsilon is computed afresh.
    """
    place = folder()
    if place is None:
        return compute()
    text = json.dumps({"version": VERSION, "sources": sources(), "kind": kind, "key": key}, sort_keys=True)
    path = place / (hashlib.sha256(text.encode()).hexdigest() + ".json")
    stored = _read(path, text)
    if stored is not None:
        return stored
    start = time.perf_counter()
    value = compute()
    if time.perf_counter() - start >= WORTH_KEEPING_SECONDS:
        _write(path, text, value)
    return value


def _digest(text: str, value: str) -> str:
    return hashlib.sha256(f"{text}\n{value}".encode()).hexdigest()


def _read(path: Path, text: str) -> float | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["of"] != text or data["digest"] != _digest(text, data["value"]):
            return None
        value = float(data["value"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if math.isnan(value) or value < 0 else value


def _write(path: Path, text: str, value: float) -> None:
    """Write to a neighbour and rename: a reader sees all of it or nothing. A full or read-only disk is no error."""
    number = repr(float(value))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"of": text, "value": number, "digest": _digest(text, number)}, file)
        os.replace(name, path)
