"""A run's folder: the names of its files, its settings, its lock, and how it appears. No torch here."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from dpulr.accounting.disk_ledger import DiskLedger, Start, ledger_digest
from dpulr.errors import PrivacyRefusal, UsageError
from dpulr.files import replace_file, sync_folder
from dpulr.plan import Plan
from dpulr.runs.config_files import read_config
from dpulr.runs.settings import IN_PROGRAM, Settings
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

    The file names the run that it was made for (`create_folder`); that name comes out. It is read before the file is locked:
    Windows lets nobody read it then. A file system that can't lock is refused: a mere file in place of a lock would outlive a
    killed process.
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


def check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        more = " It is a run: go on with 'dpulr resume'." if (folder / CONFIG).exists() else ""
        raise UsageError(f"{folder} exists and is not empty.{more}")


def create_folder(folder: Path, settings: Settings, plan: Plan, held: contextlib.ExitStack, *, planned_steps: int) -> DiskLedger:
    """The folder appears with its config and its ledger, or not at all. Whoever takes it in that moment has it."""
    config = settings.to_json()
    begin = Start(
        run=secrets.token_hex(8),
        config=ledger_digest(config),
        noise_multiplier=plan.noise_multiplier,
        rejection_threshold=plan.rejection_threshold,
        target_epsilon=settings.target_epsilon,
        target_delta=settings.target_delta,
        planned_steps=planned_steps,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{begin.run}.part")
    draft.mkdir()
    try:
        replace_file(draft / LOCK, begin.run.encode())
        replace_file(draft / CONFIG, config)
        DiskLedger.create(draft, begin)
        sync_folder(draft)
        if folder.exists():
            folder.rmdir()  # it is empty; Windows renames no folder onto another
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    held.enter_context(locked(folder))  # now: Windows renames no folder in which a file is open
    sync_folder(folder.parent)
    return DiskLedger.open(folder, begin.config)


def forget_result(folder: Path) -> None:
    """An old result.json would state less than is spent from now on."""
    (folder / RESULT).unlink(missing_ok=True)
    sync_folder(folder)
