"""Files that survive a crash: written beside, synced, renamed. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from dpulr.errors import RunError

BINARY = getattr(os, "O_BINARY", 0)  # Windows would change line ends


def write_all(handle: int, data: bytes) -> None:
    """os.write until all is written: a nearly full disk takes a part and says so only by a smaller count."""
    while data:
        data = data[os.write(handle, data) :]


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`, so that any reader at any time, and after any crash, sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.part")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o644)
        try:
            write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last. Windows has no such call, and none is needed there."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a JSON file; a missing or damaged file is named."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as missing:
        raise RunError(f"there is no {path.name} in {path.parent}.") from missing
    except (ValueError, RecursionError) as problem:
        raise RunError(f"{path} is damaged: {problem}.") from problem


def append_line(path: Path, value: Any) -> None:
    """Add one JSON line. A half-written line of an earlier crash is closed first, so that it spoils itself only."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and _last_byte(path) != b"\n"
        write_all(handle, (b"\n" if torn else b"") + json.dumps(value).encode() + b"\n")
    finally:
        os.close(handle)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. Lines that a crash left behind half-written are skipped."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found
