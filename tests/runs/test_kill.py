"""Training is killed by SIGKILL at random moments and resumed; `killer.py` holds the checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_cli import child_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_kill_hides_what_was_spent(tmp_path: Path) -> None:
    kills = 200
    command = [sys.executable, str(ROOT / "tests" / "support" / "killer.py"), str(tmp_path), str(kills), "5"]
    ended = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["kills"] == kills
    assert found["interrupted"] >= 1  # kills after the first update and before the last
    assert found["least_accuracy"] > 0.9
