"""A rank that dies, hangs or does something else: the others end, and name it."""

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

from dpulr.errors import RankLost
from tests.support.core import engine, train
from tests.support.processes import on_ranks
from tests.support.small_cli import ROOT, child_environment


def loses(rank: int, bad: int, how: str, folder: Path) -> Any:
    """Rank `bad` is lost after two steps, while the others go on."""
    private = engine(steps=20, rank_timeout=60.0 if how == "dies" else 8.0, ledger=folder / "ledger.jsonl")
    train(private, 2)
    if rank == bad:
        if how == "busy":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
    with pytest.raises(RankLost) as lost:
        train(private)
    with pytest.raises(RankLost):  # nothing goes on after that
        train(private)
    return str(lost.value)


@pytest.mark.parametrize(("bad", "how"), [(1, "dies"), pytest.param(2, "hangs", marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_by_all_others(bad: int, how: str, tmp_path: Path) -> None:
    found = on_ranks(3, loses, bad, how, tmp_path, silent=[bad])
    for rank, said in enumerate(found):
        if rank != bad:
            assert said.startswith(f"rank {bad} (process "), said
            assert "has ended, died or hangs" in said
            assert "What was charged counts as spent" in said


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "how"), [(0, "dies"), (0, "hangs"), (1, "busy"), (1, "hangs"), (0, "busy")])
def test_any_rank_may_be_lost(bad: int, how: str, tmp_path: Path) -> None:
    found = on_ranks(3, loses, bad, how, tmp_path, silent=[bad])
    for rank, said in enumerate(found):
        if rank != bad:
            assert said.startswith(f"rank {bad} (process "), said
            assert ("did not come, but lives" in said) == (how == "busy")


def full_disk(rank: int, folder: Path) -> Any:
    private = engine(steps=20, ledger=folder / "ledger.jsonl")
    train(private, 2)
    if rank == 0:
        (folder / "ledger.jsonl").rename(folder / "elsewhere")
        (folder / "ledger.jsonl").mkdir()  # no line can be added to it
    with pytest.raises((RankLost, OSError)) as problem:
        train(private)
    return type(problem.value).__name__, private.ledger.steps


def test_a_step_that_cannot_be_charged_is_computed_nowhere(tmp_path: Path) -> None:
    assert on_ranks(2, full_disk, tmp_path) == [("IsADirectoryError", 2), ("RankLost", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [12])
def test_no_kill_of_a_rank_hides_what_was_spent(tmp_path: Path, kills: int) -> None:
    """`rank_killer.py` holds the checks: the ledger is never behind what any rank has applied, and every run comes to its end.

    `make kill-ranks` does it 100 times.
    """
    command = [sys.executable, str(ROOT / "tests" / "support" / "rank_killer.py"), str(tmp_path), str(kills), "5", "2"]
    ended = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["kills"] == kills
    assert found["interrupted"] >= 1
    assert found["named"] >= found["interrupted"] / 2
    assert found["least_accuracy"] > 0.9
