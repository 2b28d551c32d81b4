"""Training is killed by SIGKILL at random moments and resumed; `killer.py` holds the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_no_kill_hides_what_was_spent(tmp_path: Path, kills: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "killer.py"), str(tmp_path), str(kills), "5"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["kills"] == kills
    assert found["lost"] >= 1  # else no kill fell into the training itself
    assert found["least_accuracy"] > 0.9
