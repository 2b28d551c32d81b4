"""Config files: what to run, and how. No torch here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dpulr.errors import UsageError
from dpulr.runs.old_configs import upgraded
from dpulr.runs.settings import Settings
from dpulr.runs.values import shortened, table_of


# --- config files -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Invocation:
    """What a config file says about how to run, rather than what to run."""

    out: str | None = None
    allow_uncertified: bool = False
    show_unprotected: bool = False
    json: bool = False


def read_config(path: Path) -> dict[str, Any]:
    """Settings in a TOML file (or the config.json of a run). A table [mechanism] holds its name and its settings."""
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise UsageError(f"the config file {path} can't be read: {problem.strerror or problem}.") from problem
    try:
        text = raw.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"the config file {path} is not valid: {problem}.") from problem
    values = dict(table_of(values))
    mechanism = values.get("mechanism")
    if isinstance(mechanism, dict):
        own = dict(mechanism)
        values["mechanism"] = own.pop("name", Settings.mechanism)
        if "repeats" in own:
            values["repeats"] = own.pop("repeats")
        values["mechanism_options"] = {**dict(table_of(values.get("mechanism_options", {}))), **own}
    return upgraded(values) if path.suffix == ".json" else values


def split_invocation(config: Mapping[str, Any]) -> tuple[dict[str, Any], Invocation]:
    """A config's settings, and how to run them."""
    values = dict(config)
    how = {item.name: values.pop(item.name) for item in fields(Invocation) if item.name in values}
    for name, value in how.items():
        if not isinstance(value, str if name == "out" else bool):
            raise UsageError(f"{name} is {shortened(value)}; it must be {'a path' if name == 'out' else 'true or false'}.")
    return values, Invocation(**how)
