"""Values of settings as people write them: words and numbers, `key=value` pairs, tables. No torch here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from dpulr.errors import UsageError


def table_of(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"a table of settings was expected, not {shortened(value)}.")
    return value


def keys_of(sets: Iterable[str]) -> list[str]:
    """The settings that `key=value` pairs name."""
    return [name for name, _ in map(pair_of, sets)]


def pairs_of(sets: Iterable[str]) -> list[tuple[str, Any]]:
    """Names and values of `key=value` pairs."""
    return [pair_of(text) for text in sets]


def pair_of(text: str) -> tuple[str, Any]:
    """`key=value`, the value as in TOML; what is not TOML is taken as a word."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UsageError(f"--set takes key=value, not {shortened(text)}.")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return name.strip(), None if value.strip() in ("none", "None") else value.strip()
    return name.strip(), parsed["value"] if set(parsed) == {"value"} else value.strip()


def converted(name: str, value: Any, allowed: tuple[type[Any], ...]) -> Any:
    """The value in one of the types that a setting may have; only changes that lose nothing are made."""
    if value is None and type(None) in allowed:
        return None
    if dict in allowed:
        return _plain(name, dict(table_of(value)))
    if isinstance(value, bool):
        pass
    elif isinstance(value, int) and int in allowed:
        return value
    elif isinstance(value, int | float) and float in allowed and abs(value) < 1e300:
        return float(value)
    elif isinstance(value, float) and int in allowed and value.is_integer() and abs(value) < 2**53:
        return int(value)
    elif isinstance(value, str) and str in allowed and "\x00" not in value:
        return _number(value, allowed)
    words = {int: "a whole number", float: "a number", str: "a word", type(None): "none"}
    expected = " or ".join(words[kind] for kind in allowed)
    raise UsageError(f"{name} is {shortened(value)}; it must be {expected}.")


def _number(text: str, allowed: tuple[type[Any], ...]) -> int | float | str:
    """What a word says where numbers are allowed, too; else the word."""
    if int in allowed and text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    if float in allowed and len(text) < 40:
        with suppress(ValueError):
            return float(text)
    return text


def _plain(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Only what JSON can hold: a run must be repeatable from its config.json."""
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(f"{name} holds a value that can't be stored: {problem}.") from problem
    return values


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
