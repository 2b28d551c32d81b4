"""The ledger on disk, written ahead: a step's cost is synced before the step is computed (docs/cli.md, "The ledger").

One JSON line per entry. The first names the run, its settings and its budget. Then an `event` says once what a kind of step
releases, and each `step` refers to one. An `evaluation` is a noisy one, on private held-out records. A `resume` says that the run
went on, and under which budget. Each entry holds the hash of the one before, and `ledger.head` the number and hash of the last: an
edited, shortened or foreign ledger is noticed. The hashes have no key; they are against accidents and edits by hand, not against
somebody who computes them anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dpulr import accounting
from dpulr.accounting import events
from dpulr.accounting.events import Charge, SampledStep, Unaccounted
from dpulr.errors import InvalidArgument, PrivacyRefusal
from dpulr.files import BINARY, write_all

LEDGER, HEAD = "ledger.jsonl", "ledger.head"
FORMAT = 1
_HEAD_SIZE = 128


@dataclass(frozen=True)
class Start:
    """What the first entry fixes for the whole run."""

    run: str
    config: str
    noise_multiplier: float
    rejection_threshold: int
    target_epsilon: float | None
    target_delta: float
    planned_steps: int


class DiskLedger(accounting.Ledger):
    """A ledger whose every charge is on disk before `append` returns. If that fails, it raises, and the step does not happen."""

    def __init__(self, folder: Path, start: Start, *, entries: int = 0, head: str = "") -> None:
        super().__init__()
        self.folder, self.start = folder, start
        self.budget, self.planned_steps, self.resumes = start.target_epsilon, start.planned_steps, 0
        self.entries, self.head = entries, head
        self.seconds = 0.0
        self._events: list[SampledStep | Unaccounted] = []
        self._order: list[int] = []
        self._broken = False
        self.lock: FileLock | None = None

    # --- opening --------------------------------------------------------------------------------------------------------
    @classmethod
    def create(cls, folder: Path, start: Start) -> DiskLedger:
        """Begin the ledger of a new run."""
        ledger = cls(folder, start)
        ledger._write({"kind": "start", "format": FORMAT, "at": now(), **vars(start)})
        return ledger

    @classmethod
    def open(cls, folder: Path, config: str, *, growing: bool = False) -> DiskLedger:
        """Read a run's ledger and check that it is whole and belongs to the settings with this hash.

        `growing`: only to look at it, while another process may be adding to it.
        """
        head = _read_head(folder)  # before the ledger, which may grow meanwhile
        lines = _whole_lines(folder / LEDGER)
        try:
            values = _chained(lines)
            start = _start(values[0])
            ledger = cls(folder, start, entries=len(lines), head=_hash(lines[-1]))
            for value in values[1:]:
                ledger._replay(value)
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise PrivacyRefusal(
                f"{folder / LEDGER} was changed or damaged ({problem}): what this run has spent can't be told any more, so it "
                "can't go on."
            ) from problem
        _check_head(folder, lines, *head, growing=growing)
        if start.config != config:
            raise PrivacyRefusal(f"{folder / LEDGER} belongs to another run: config.json is not the one that it started with.")
        return ledger

    def _replay(self, value: Mapping[str, Any]) -> None:
        if value["kind"] == "step":
            index = _whole(value["event"])
            if index >= len(self._events):
                raise ValueError(f"step of an unknown event {index!r}")
            super().append(self._events[index])
            self._order.append(index)
        elif value["kind"] == "event":
            step = events.from_dict(value["step"])
            if not isinstance(step, SampledStep | Unaccounted):
                raise ValueError(f"{type(step).__name__} is not a step")
            self._events.append(step)
        elif value["kind"] == "evaluation":
            super().charge_evaluation(_number(value["epsilon"]))
        elif value["kind"] == "resume":
            self.budget = None if value["target_epsilon"] is None else _number(value["target_epsilon"])
            self.planned_steps = _whole(value["planned_steps"])
            self.resumes += 1
        else:
            raise ValueError(f"unknown entry {value['kind']!r}")

    # --- writing --------------------------------------------------------------------------------------------------------
    def append(self, step: SampledStep | Unaccounted, count: int = 1) -> None:
        """Charge steps: on disk first, then in memory."""
        charge = Charge(step, count)
        if step not in self._events:
            self._write({"kind": "event", "step": events.to_dict(step)})
            self._events.append(step)
        index = self._events.index(step)
        for _ in range(charge.count):
            self._write({"kind": "step", "number": self.steps + 1, "event": index})
            super().append(step)
            self._order.append(index)

    def charge_evaluation(self, epsilon: float) -> None:
        """On disk first, then in memory."""
        self._write({"kind": "evaluation", "epsilon": epsilon})
        super().charge_evaluation(epsilon)

    def charges_after(self, steps: int) -> list[Charge]:
        """What the first `steps` steps were charged."""
        counts = Counter(self._order[:steps])
        return [Charge(self._events[index], count) for index, count in counts.items()]

    @property
    def last(self) -> SampledStep | Unaccounted | None:
        """What was charged last."""
        return self._events[self._order[-1]] if self._order else None

    def record_resume(self, *, budget: float | None, planned_steps: int) -> None:
        """Record that the run goes on, towards how many steps, and under which budget. A budget is only ever raised."""
        if budget != self.budget and (budget is None or self.budget is None or budget < self.budget):
            raise PrivacyRefusal(f"the budget is {self.budget}; it can be raised, but not set to {budget}.")
        value = {"kind": "resume", "at": now(), "target_epsilon": budget, "planned_steps": planned_steps}
        self._write(value if budget == self.budget else {**value, "raised_from": self.budget})
        self.budget, self.planned_steps, self.resumes = budget, planned_steps, self.resumes + 1

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._broken:
            raise PrivacyRefusal("an earlier entry of the ledger could not be written; resume the run to go on.")
        began = time.perf_counter()
        line = json.dumps({**value, "previous": self.head}).encode()
        self._broken = True
        handle = os.open(self.folder / LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
        try:
            write_all(handle, line + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)
        self.entries, self.head = self.entries + 1, _hash(line)
        _write_head(self.folder, self.entries, self.head)
        self._broken = False
        self.seconds += time.perf_counter() - began


def ledger_at(path: Path, **plan: Any) -> DiskLedger:
    """The ledger of a program of one's own, at this path: made if it is missing; what an existing one holds counts as spent.

    It is held by this process until it ends. `plan`: the fields of `Start` but for its names.
    """
    if path.name != LEDGER:
        raise InvalidArgument(f"ledger is {str(path)!r}; it must be a path that ends in {LEDGER}.")
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0, mode=0o644, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as held:
        raise PrivacyRefusal(f"another process charges its steps to {path}.") from held
    own = ledger_digest(b"a program of one's own")
    if path.exists():
        cut_torn_end(folder)
        ledger = DiskLedger.open(folder, own)
    else:
        ledger = DiskLedger.create(folder, Start(run=secrets.token_hex(8), config=own, **plan))
    ledger.lock = lock
    return ledger


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def ledger_digest(config: bytes) -> str:
    """The hash by which a ledger knows its settings."""
    return hashlib.sha256(config).hexdigest()


# --- reading ------------------------------------------------------------------------------------------------------------
def _whole_lines(path: Path) -> list[bytes]:
    """The entries, without the newline. What a crash left behind the last newline was never acted on: it is cut off."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as missing:
        raise PrivacyRefusal(f"there is no {path.name} in {path.parent}: what was spent can't be told.") from missing
    whole = raw.rfind(b"\n") + 1
    lines = raw[:whole].split(b"\n")[:-1]
    if not lines:
        raise PrivacyRefusal(f"{path} is empty: what was spent can't be told.")
    return lines


def cut_torn_end(folder: Path) -> None:
    """Remove a half-written last entry, so that the next one starts on a line of its own. Call it with the lock held."""
    path = folder / LEDGER
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        handle = os.open(path, os.O_WRONLY)
        try:
            os.ftruncate(handle, whole)
            os.fsync(handle)
        finally:
            os.close(handle)


def _chained(lines: list[bytes]) -> list[Mapping[str, Any]]:
    values: list[Mapping[str, Any]] = []
    previous = ""
    for number, line in enumerate(lines, 1):
        value = json.loads(line)
        if not isinstance(value, dict) or value.get("previous") != previous:
            raise ValueError(f"entry {number} does not follow from the one before")
        previous = _hash(line)
        values.append(value)
    return values


def _start(value: Mapping[str, Any]) -> Start:
    if value["kind"] != "start" or value["format"] != FORMAT:
        raise ValueError("the first entry is not the start of a run in a format that this version knows")
    target = value["target_epsilon"]
    if not all(isinstance(value[name], str) for name in ("run", "config")):
        raise ValueError("the first entry does not name the run")
    return Start(
        run=value["run"],
        config=value["config"],
        noise_multiplier=_number(value["noise_multiplier"]),
        rejection_threshold=_whole(value["rejection_threshold"]),
        target_epsilon=None if target is None else _number(target),
        target_delta=_number(value["target_delta"]),
        planned_steps=_whole(value["planned_steps"]),
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


# --- the head -----------------------------------------------------------------------------------------------------------
def _write_head(folder: Path, entries: int, head: str) -> None:
    """Overwritten in place, always of one size: a full disk has room for it. It follows the ledger, it never leads."""
    handle = os.open(folder / HEAD, os.O_WRONLY | os.O_CREAT | BINARY, 0o644)
    try:
        write_all(handle, _head_line(entries, head))
        os.fsync(handle)
    finally:
        os.close(handle)


def _head_line(entries: int, head: str) -> bytes:
    return f"{entries} {head}".encode().ljust(_HEAD_SIZE - 1) + b"\n"


def _read_head(folder: Path) -> tuple[int, str]:
    try:
        count, head = (folder / HEAD).read_text(encoding="utf-8").split()
        return int(count), head
    except (OSError, ValueError) as problem:
        raise PrivacyRefusal(
            f"{folder / HEAD} is missing or damaged: whether {LEDGER} is whole can't be told, nor what this run has spent."
        ) from problem


def _check_head(folder: Path, lines: list[bytes], entries: int, head: str, *, growing: bool) -> None:
    """The ledger may be ahead of the head by an entry whose step never began; it may not be behind."""
    if len(lines) > entries + 1 and not growing:
        raise PrivacyRefusal(f"{folder / LEDGER} was changed: it holds {len(lines)} entries, but {entries} were written.")
    if not 1 <= entries <= len(lines):
        raise PrivacyRefusal(f"{folder / LEDGER} was shortened: it holds {len(lines)} entries, but {entries} were written.")
    if _hash(lines[entries - 1]) != head:
        raise PrivacyRefusal(f"{folder / LEDGER} was changed: its entry {entries} is not the one that was written.")


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
