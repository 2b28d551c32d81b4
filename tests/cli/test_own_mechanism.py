"""A mechanism from outside: every command works with it, and no file of the package knows it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpulr.mechanisms import known
from tests.support.small_cli import Ended

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_mechanism.py"
JOB = ("--dataset", "tests.support.small_job:data", "--model", "tests.support.small_job:model", "--mechanism", "mine:votes")
SMALL = (*JOB, "--batch-size", "40", "--target-epsilon", "3", "--repeats", "4")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example as the user's own module `mine`."""
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(known, "_REGISTERED", dict(known._REGISTERED))  # forget it afterwards
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_all_commands(mine: Path, run_cli: Callable[..., Ended]) -> None:
    planned = json.loads(run_cli("plan", *SMALL, "--steps", 30, "--json").out)
    ended = run_cli("train", *SMALL, "--steps", 30, "--out", "run", "--json")
    assert ended.code == 0, ended.err
    result = json.loads((mine / "run" / "result.json").read_text())
    assert (result["mechanism"], result["guarantee"]) == ("mine:votes", "certified")
    assert result["noise_multiplier"] == planned["noise_multiplier"]
    assert result["forward_passes"] == 30 * (1 + 4 * 2)
    assert "30 steps of the votes mechanism" in result["statement"]
    assert run_cli("resume", "run", "--epsilon", 4, "--steps", 40).code == 0
    assert json.loads((mine / "run" / "result.json").read_text())["steps"] == 40
    assert run_cli("report", "run").code == 0
    assert "of the votes mechanism" in (mine / "run" / "report.html").read_text()
    assert run_cli("evaluate", "run").code == 0


def test_audit(mine: Path, run_cli: Callable[..., Ended]) -> None:
    ended = run_cli("audit", "--mechanism", "mine:votes", "--canary", "large", "--trials", 200, "--seed", 1)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("holds (measured ")
    assert "votes, one step" in ended.out
