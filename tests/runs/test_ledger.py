"""The ledger on disk: written ahead, refused when it was touched, and safe when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dpulr import files
from dpulr.accounting.disk_ledger import HEAD, LEDGER, DiskLedger, Start
from dpulr.accounting.events import GaussianRelease, SampledStep
from dpulr.errors import PrivacyRefusal
from tests.support.small_cli import SMALL, Ended, Forked

Cli = Callable[..., Ended]
STEP = SampledStep(GaussianRelease(2.0), 0.1)
START = Start("some run", "some config", 2.0, 0, 1.0, 1e-5, 50)


def steps_on_disk(folder: Path) -> int:
    """Whole entries only."""
    return sum(line.endswith(b"\n") and b'"kind": "step"' in line for line in (folder / LEDGER).read_bytes().splitlines(True))


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_round_trip(tmp_path: Path) -> None:
    ledger = DiskLedger.create(tmp_path, START)
    other = SampledStep(GaussianRelease(3.0), 0.1)
    for step in (STEP, STEP, other, STEP):
        ledger.append(step)
    ledger.record_resume(budget=1.5, planned_steps=70)
    again = DiskLedger.open(tmp_path, "some config")
    assert again == ledger
    assert (again.start, again.budget, again.planned_steps, again.resumes) == (START, 1.5, 70, 1)
    assert [charge.count for charge in again.charges_after(3)] == [2, 1]
    again.append(STEP)
    assert DiskLedger.open(tmp_path, "some config").steps == 5


def test_a_charge_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = DiskLedger.create(tmp_path, START)
    ledger.append(STEP)
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(steps_on_disk(tmp_path)), real(handle))[1])
    ledger.append(STEP)
    assert synced == [2, 2]  # the ledger, then its head


def test_the_step_is_charged_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the mechanism starts to compute, the step must be on disk; and no noise may have been drawn into anything."""
    from dpulr.runs import Settings
    from dpulr.runs.training import Training
    from tests.support import small_job

    job = Settings(mechanism="gaussian", batch_size=20, steps=3, target_epsilon=2)
    training = Training(job, small_job.data()[0], small_job.model())
    training.engine.use_ledger(DiskLedger.create(tmp_path, START))
    seen: list[int] = []
    fitted = getattr(training.engine, "fitted", None) or training.engine.bound
    name = "sum_of_bounded_signals" if hasattr(fitted, "sum_of_bounded_signals") else "total"
    real = getattr(type(fitted), name)

    def watched(*given: object, **named: object) -> object:
        seen.append(steps_on_disk(tmp_path))
        return real(*given, **named)

    monkeypatch.setattr(type(fitted), name, watched)
    for _ in training.steps():
        pass
    assert seen == [1, 2, 3]


def test_edits_are_refused(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    lines = (finished / LEDGER).read_bytes().splitlines(keepends=True)
    other_noise = lines[1].replace(b'"noise_multiplier": ', b'"noise_multiplier": 9')
    damages = {
        "without the last step": lines[:-1],
        "without a step in between": [*lines[:5], *lines[6:]],
        "a step twice": [*lines[:5], lines[4], *lines[5:]],
        "two steps swapped": [*lines[:5], lines[6], lines[5], *lines[7:]],
        "more noise than there was": [lines[0], other_noise, *lines[2:]],
        "a higher budget": [lines[0].replace(b'"target_epsilon": 2.0', b'"target_epsilon": 9.0'), *lines[1:]],
        "only the start": lines[:1],
        "nothing": [],
        "no JSON": [*lines, b"hello\n"],
    }
    assert other_noise != lines[1]
    for name, changed in damages.items():
        folder = copy_of(finished, tmp_path / name.replace(" ", "-"))
        (folder / LEDGER).write_bytes(b"".join(changed))
        for command in (("resume", folder, "--target-epsilon", 3), ("report", folder)):
            ended = run_cli(*command)
            assert (ended.code, LEDGER in ended.err) == (3, True), (name, ended.err)
        assert (folder / LEDGER).read_bytes() == b"".join(changed)


def test_foreign_and_missing_files_are_refused(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    other = tmp_path / "other"
    assert run_cli("train", *SMALL, "--steps", 5, "--out", other).code == 0
    for names in ((LEDGER,), (HEAD,), (LEDGER, HEAD), ("config.json",), ("checkpoint.safetensors",)):
        foreign = copy_of(finished, tmp_path / f"foreign-{'-'.join(names)}")
        for name in names:
            shutil.copy(other / name, foreign / name)
        assert run_cli("resume", foreign, "--target-epsilon", 3).code == 3, names
    for name in (LEDGER, HEAD):
        without = copy_of(finished, tmp_path / f"without-{name}")
        (without / name).unlink()
        assert run_cli("resume", without, "--target-epsilon", 3).code == 3, name


def test_a_ledger_of_the_same_settings_is_still_another_runs(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    other = tmp_path / "other"
    assert run_cli("train", "--config", finished / "config.json", "--out", other).code == 0
    for name in (LEDGER, HEAD):
        shutil.copy(other / name, finished / name)
    (finished / "checkpoint.safetensors").unlink()
    ended = run_cli("resume", finished, "--target-epsilon", 3)
    assert (ended.code, "another run" in ended.err) == (3, True)


def test_a_growing_ledger_can_be_looked_at(tmp_path: Path) -> None:
    """A report reads the head, then the ledger; meanwhile the run goes on."""
    ledger = DiskLedger.create(tmp_path, START)
    head = (tmp_path / HEAD).read_bytes()
    for _ in range(5):
        ledger.append(STEP)
    (tmp_path / HEAD).write_bytes(head)
    assert DiskLedger.open(tmp_path, "some config", growing=True).steps == 5
    with pytest.raises(PrivacyRefusal, match="was changed"):
        DiskLedger.open(tmp_path, "some config")


def test_a_rolled_back_run_is_refused_if_only_the_ledger_is_old(finished: Path, run_cli: Cli) -> None:
    """Ledger and head of an earlier moment, put back to gain budget, do not fit the checkpoint."""
    before = {name: (finished / name).read_bytes() for name in (LEDGER, HEAD)}
    assert run_cli("resume", finished, "--target-epsilon", 2.5, "--steps", 14).code == 0
    for name, content in before.items():
        (finished / name).write_bytes(content)
    ended = run_cli("resume", finished, "--target-epsilon", 2.5, "--steps", 14)
    assert (ended.code, "newer than the ledger" in ended.err) == (3, True)


def test_a_torn_last_line_is_no_loss(finished: Path, run_cli: Cli) -> None:
    """A crash in the middle of writing an entry: its step never began."""
    with (finished / LEDGER).open("ab") as file:
        file.write(b'{"kind": "step", "numb')
    assert run_cli("resume", finished, "--target-epsilon", 2.3, "--steps", 14).code == 0
    assert steps_on_disk(finished) == 14


# --- full disks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("room", [0, 10, 120, 500, 1_000])
def test_a_full_disk_takes_no_step_uncharged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    ledger = DiskLedger.create(tmp_path, START)
    left = [room]
    real = os.write

    def write(handle: int, data: bytes) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(handle, data[: left[0]])
        left[0] -= taken
        return taken

    monkeypatch.setattr(files.os, "write", write)
    taken = 0

    def take_all() -> None:
        nonlocal taken
        for taken in range(50):  # noqa: B007
            ledger.append(STEP)

    with pytest.raises(OSError, match="space"):
        take_all()
    with pytest.raises(PrivacyRefusal):  # and it stays shut
        ledger.append(STEP)
    monkeypatch.undo()
    assert DiskLedger.open(tmp_path, "some config").steps == taken == ledger.steps


def test_training_on_a_full_disk(tmp_path: Path, run_cli: Cli) -> None:
    """The operating system refuses to let any file grow beyond a limit, in the middle of a run."""
    folder, updates = tmp_path / "run", tmp_path / "updates"

    def limit() -> None:
        os.environ.update(SMALL_JOB_UPDATES=str(updates), DPULR_CACHE="off")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))

    ended = Forked("train", *SMALL, "--steps", "60", "--out", folder, folder=tmp_path, before=limit).end()
    assert ended.code == 1
    assert "the disk is full" in ended.err
    assert "Traceback" not in ended.err
    made = updates.stat().st_size
    assert 0 < made == steps_on_disk(folder) < 60
    assert run_cli("resume", folder).code == 0
    assert json.loads((folder / "result.json").read_text())["steps"] == 60


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root can make a small file system")
def test_training_on_a_file_system_without_room(tmp_path: Path, run_cli: Cli) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        ended = run_cli("train", *SMALL, "--steps", 300, "--out", disk / "run")
        assert (ended.code, "the disk is full" in ended.err) == (1, True)
        charged = steps_on_disk(disk / "run")
        assert charged < 300
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert run_cli("resume", disk / "run").code == 0
        assert steps_on_disk(disk / "run") == 300
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_signals_and_limits_are_left_as_they_were() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000
