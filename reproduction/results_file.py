"""Results in a JSON list, each under the settings it came from: what is there is not run again, so a stopped experiment goes on."""

from __future__ import annotations

import fcntl
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from dpulr.mechanisms import Gaussian, HiddenDirection, ZerothOrder
from reproduction.opacus import OpacusDPSGD

Result = dict[str, Any]
DEFAULTS: dict[str, dict[str, Any]] = {kind.name: vars(kind()) for kind in (HiddenDirection, Gaussian, ZerothOrder, OpacusDPSGD)}


class Described(Protocol):
    """Settings of a run."""

    def describe(self) -> dict[str, Any]: ...


def found(settings: Iterable[Described], file: Path) -> list[Result]:
    """The results of those settings that have been run."""
    known, keys = _known(file), [_key(setting.describe()) for setting in settings]
    return [known[key] for key in keys if key in known]


def add(file: Path, result: Result) -> None:
    """Add a result to what the file holds now: another process may be at work on it. A reader never sees half a file."""
    result = {**result, "machine": platform.machine(), "python": platform.python_version()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft = file.with_suffix(".part")
        draft.write_text(json.dumps(list((_known(file) | {_key(result["recipe"]): result}).values()), indent=1) + "\n")
        draft.replace(file)


def _known(file: Path) -> dict[str, Result]:
    return {_key(result["recipe"]): result for result in json.loads(file.read_text())} if file.exists() else {}


def _key(recipe: dict[str, Any]) -> str:
    """What tells runs apart: settings of the mechanism count where they differ from its defaults, so that options may be added.

    Epsilon counts to six digits: a computed one differs in the last bit from machine to machine. 4 and 4.0 are the same.
    """
    plain = dict(recipe)
    if "mechanism" in plain:
        defaults = DEFAULTS.get(plain["mechanism"]["name"], {})
        plain["mechanism"] = {n: v for n, v in plain["mechanism"].items() if n not in defaults or v != defaults[n]}
    if plain.get("target_epsilon"):
        plain["target_epsilon"] = float(f"{plain['target_epsilon']:.6g}")
    return json.dumps(_as_floats(plain), sort_keys=True, default=str)


def _as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_floats(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
