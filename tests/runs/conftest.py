"""A small job, and `dpulr` run inside the test's process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_cli import SMALL, Ended, dpulr


@pytest.fixture
def run_cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def call(*arguments: object) -> Ended:
        return dpulr(capfd, *arguments)

    return call


@pytest.fixture
def finished(tmp_path: Path, run_cli: Callable[..., Ended]) -> Path:
    """A finished small run."""
    folder = tmp_path / "finished"
    ended = run_cli("train", *SMALL, "--steps", 12, "--out", folder)
    assert ended.code == 0, ended.err
    return folder
