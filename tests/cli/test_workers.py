"""`dpulr train` on several processes, by torchrun and by `--workers`: real processes, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dpulr.cli.progress import SilentView
from dpulr.runs import Settings, start
from tests.support.processes import on_ranks
from tests.support.small_cli import ROOT, SMALL, child_environment, dpulr

STEPS = 300
JOB = [*SMALL, "--steps", str(STEPS)]


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    where = ["--out", str(folder)]
    return subprocess.Popen([sys.executable, "-m", *command, *JOB, *where], env=child_environment(), cwd=ROOT, **pipes)


def workers_of(launcher: int) -> list[int]:
    """The processes that it has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == launcher:
                found.append(int(status.parent.name))
        except OSError:
            continue  # it has just ended
    return sorted(found)


@pytest.mark.slow
def test_a_worker_that_hangs_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "dpulr", "train", "--workers", "2", "--rank-timeout", "6")
    ledger = tmp_path / "run" / "ledger.jsonl"
    while process.poll() is None and not (ledger.exists() and ledger.read_text().count('"kind": "step"') >= 20):
        time.sleep(0.01)
    stopped = workers_of(process.pid)[-1]
    os.kill(stopped, signal.SIGSTOP)
    out, err = process.communicate()
    assert process.returncode == 1
    assert f"rank 1 (process {stopped} " in err, (out + err)[-3000:]
    assert "(time-out: 6 s)" in err
    assert "frame #" not in err  # torch's own stacks


def otherwise(rank: int, name: str, value: Any, folder: Path) -> dict[str, Any]:
    return start(Settings(**{name: value} if rank else {}), folder, SilentView())


@pytest.mark.parametrize(("name", "value", "usual"), [("schedule", "constant", "cosine"), ("evaluations", 2, 20)])
def test_ranks_with_other_settings_are_refused_by_name(name: str, value: Any, usual: Any, tmp_path: Path) -> None:
    """Those that an engine does not know of, too. Nothing is written."""
    for found in on_ranks(2, otherwise, name, value, tmp_path / "run"):
        assert found.text.startswith(f"rank 1 was started with another {name} than rank 0: {value}, not {usual}.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e15"])
def test_a_time_out_is_a_number_of_seconds(value: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert json.loads(dpulr(capfd, "train", "--rank-timeout", "7", "--dry-run").out)["rank_timeout"] == 7
    for command in (["train", *JOB, "--out", tmp_path / "run"], ["resume", tmp_path / "run"]):
        ended = dpulr(capfd, *command, "--rank-timeout", value)
        assert ended.code == 2
        assert "rank_timeout is" in ended.err


@pytest.mark.slow
def test_torchrun_trains_with_one_voice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = started(tmp_path / "run", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dpulr", "train")
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    assert (out + err).count(f"step {STEPS} of {STEPS} ") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["ranks"] == 2
    assert result["bytes_per_step"] == 4 * result["parameters"]  # in a ring of two: half of it there, half of it back
    assert result["guarantee"] == "certified"
    assert dpulr(capfd, "report", tmp_path / "run").code == 0
    report = (tmp_path / "run" / "report.html").read_text()
    for text in ("processes", "bytes that each sends per step", f"{result['bytes_per_step']:,}", "communication"):
        assert text in report


@pytest.mark.slow
def test_workers_that_are_killed_start_again_and_go_on(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "dpulr", "train", "--workers", "2", "--restarts", "2")
    ledger = tmp_path / "run" / "ledger.jsonl"
    for wanted, victim in ((80, 0), (180, -1)):
        while process.poll() is None and not (ledger.exists() and ledger.read_text().count('"kind": "step"') >= wanted):
            time.sleep(0.01)
        os.kill(workers_of(process.pid)[victim], signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, (out + err)[-3000:]
    for rank in (0, 1):
        assert f"rank {rank} (process " in err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    lost = result["steps"] - result["updates_kept"]
    assert (result["status"], result["steps"], result["resumes"], result["ranks"]) == ("done", STEPS, 2, 2)
    assert 0 < lost < 2 * STEPS / 3  # twice what came after a checkpoint, one of three; it is charged all the same
    assert result["epsilon"] <= 2


def test_under_torchrun_the_folder_must_be_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ended = dpulr(capfd, "train", *JOB)
    assert ended.code == 2
    assert "under torchrun give --out" in ended.err
    ended = dpulr(capfd, "train", *JOB, "--out", "anywhere", "--workers", "2")
    assert ended.code == 2
    assert "under torchrun they are there already" in ended.err
