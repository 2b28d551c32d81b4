"""A black box held by Ray actors. `support/ray_box.py` runs it on a real local cluster, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dpulr
from tests.support.small_cli import ROOT, child_environment


@pytest.mark.slow
def test_actors_share_the_calls_and_are_started_again(tmp_path: Path) -> None:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "ray_box.py"), str(tmp_path)]
    ended = subprocess.run(command, env=child_environment(**quiet), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["equal"]  # to one process, to the bit, although an actor was killed in between
    assert found["processes"] == 3
    assert found["together"] == 80  # two calls at a time: each has waited for the other
    assert found["after_hanging"] == [[0.25] * 4]
    assert found["after_odd_records"] == [0.25] * 12  # they leave the box to the others, as often as they come
    assert found["failing"] == "the black box 'failing' raised ValueError: the board is full"


@pytest.mark.parametrize("setting", [{"actors": 0}, {"actors": 1, "restarts": -1}])
def test_wrong_numbers_are_named_before_a_cluster_is_started(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=list(setting)[-1]):
        dpulr.BlackBox.ray(lambda: None, (1,), **setting)
