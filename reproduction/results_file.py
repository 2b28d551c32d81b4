"""Results as JSON lists, each under the description of its run: what is there is not run again, so a stopped study goes on."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import reproduction
from reproduction.run import OPTIONS, SETTINGS, Result, Run

FOLDER_VARIABLE = "DPULR_RESULTS"


def folder() -> Path:
    """Where the results are; a test, or a try of one's own, sets DPULR_RESULTS."""
    return Path(os.environ.get(FOLDER_VARIABLE, reproduction.RESULTS))


def found(runs: Iterable[Run]) -> list[Result]:
    """The results of those runs that have been made."""
    read: dict[str, dict[str, Result]] = {}
    results = []
    for run in runs:
        if run.file not in read:
            read[run.file] = _known(folder() / run.file)
        results += [result for result in [read[run.file].get(key(run.describe()))] if result is not None]
    return results


def described(file: str, **changes: Any) -> list[Result]:
    """Results by what their descriptions say: for settings that the package no longer has."""
    wanted = [(name, _plain(value)) for name, value in changes.items()]
    return [
        result
        for result in _known(folder() / file).values()
        if all(_plain(result["run"].get(name)) == value for name, value in wanted)
    ]


def add(run: Run, result: Result) -> None:
    """Add a result to what the file holds now: another process may be at work on it. A reader never sees half a file."""
    about = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    file = folder() / run.file
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft = file.with_suffix(".part")
        results = _known(file) | {key(result["run"]): {**result, **about}}
        draft.write_text(json.dumps(list(results.values()), indent=1) + "\n")
        draft.replace(file)


def key(description: Mapping[str, Any]) -> str:
    """What tells runs apart. Epsilon counts to six digits: a computed one differs in the last bit from machine to machine."""
    options, usual = description["mechanism_options"], OPTIONS.get(description["mechanism"], {})
    plain = {name: value for name, value in description.items() if name not in SETTINGS or value != SETTINGS[name]}
    plain["mechanism_options"] = {name: value for name, value in options.items() if name not in usual or value != usual[name]}
    if plain.get("target_epsilon"):
        plain["target_epsilon"] = float(f"{plain['target_epsilon']:.6g}")
    return json.dumps(_plain(plain), sort_keys=True)


def mean_and_spread(results: Iterable[Result]) -> tuple[float, float]:
    """Mean test accuracy and its standard deviation over the seeds, in per cent."""
    accuracies = [100 * result["test_accuracy"] for result in results]
    return statistics.mean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0


def _known(file: Path) -> dict[str, Result]:
    return _read(file, file.stat().st_mtime_ns) if file.exists() else {}


@lru_cache(maxsize=8)
def _read(file: Path, changed: int) -> dict[str, Result]:
    """The file as it was at a time: tables ask for the same one again and again."""
    return {key(result["run"]): result for result in json.loads(file.read_text())}


def _plain(value: Any) -> Any:
    """4 and 4.0 are the same, and so are lists and tuples."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
