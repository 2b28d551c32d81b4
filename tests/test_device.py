"""Training on a device that is not the CPU: `support/on_a_device.py`, in a process of its own.

A device that torch knows changes the whole process: backward passes get a thread for it, which no forked process has, as those of
tests/distributed are.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.small_cli import ROOT, child_environment


@pytest.mark.parametrize("tier", ["not slow", "slow"])
@pytest.mark.slow
def test_on_a_pretended_device(tier: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", tier, "tests/support/on_a_device.py"]
    ended = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert " passed" in ended.stdout
