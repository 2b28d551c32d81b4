"""A run's folder: the names of its files, its settings, its lock. No torch here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from dpulr.errors import PrivacyRefusal, UsageError
from dpulr.runs.settings import IN_PROGRAM, Settings, read_config
from dpulr.user_code import user_module

CONFIG, METRICS, RESULT, UNPROTECTED = "config.json", "metrics.jsonl", "result.json", "unprotected.jsonl"
LOCK = ".lock"
SEARCH = "search.json"


def open_config(folder: Path) -> tuple[Settings, bytes]:
    """The settings of a run, and the bytes that its ledger knows them by."""
    if not folder.is_dir():
        raise UsageError(f"there is no run {folder}.")
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} is not a run: it has no {CONFIG}.")
    settings = Settings.build(read_config(path))
    _import_users_code(settings)
    return settings, path.read_bytes()


def check_single(folder: Path) -> None:
    """A search is no single run: it has no ledger of steps."""
    if (folder / SEARCH).exists():
        raise UsageError(
            f"{folder} is a search (dpulr tune), not a single run: what it found, and what it cost, stands in its {RESULT}; "
            "'dpulr tune --resume' goes on with one that is unfinished."
        )


def _import_users_code(settings: Settings) -> None:
    """A user's module may register a mechanism, and the kind of release that the ledger holds. Where it fails, it is not needed,
    or whoever needs it says so."""
    for path in (settings.dataset, settings.model, settings.mechanism):
        if ":" in path and path.partition(":")[0] not in ("csv", "parquet", "hf", IN_PROGRAM):
            with contextlib.suppress(UsageError):
                user_module(path.partition(":")[0])


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Hold the run. The operating system lets go of the lock when the process ends, however it ends.

    The file names the run that it was made for (`create_folder` in run.py); that name comes out. It is read before the file is
    locked: Windows lets nobody read it then. A file system that can't lock is refused: a mere file in place of a lock would
    outlive a killed process.
    """
    path = folder / LOCK
    owner = b""
    with contextlib.suppress(OSError):
        owner = path.read_bytes()[:100]
    lock = FileLock(path, timeout=0, mode=0o644, fallback_to_soft=False, preserve_lock_file=True)
    try:
        lock.acquire()
    except Timeout as held:
        raise PrivacyRefusal(
            f"another process works on {folder}. Two at once would each spend the budget that the other counts on."
        ) from held
    try:
        yield owner.decode("ascii", "replace")
    finally:
        lock.release()
