"""The files of a run folder, and reading its settings. No torch here."""

from __future__ import annotations

from pathlib import Path

from dpulr.runs.errors import UsageError
from dpulr.runs.settings import Settings, read_config

CONFIG, METRICS, RESULT, UNPROTECTED = "config.json", "metrics.jsonl", "result.json", "unprotected.jsonl"


def open_config(folder: Path) -> tuple[Settings, bytes]:
    """The settings of a run, and the bytes that its ledger knows them by."""
    if not folder.is_dir():
        raise UsageError(f"there is no run {folder}.")
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} is not a run: it has no {CONFIG}.")
    return Settings.build(options=read_config(path)), path.read_bytes()
