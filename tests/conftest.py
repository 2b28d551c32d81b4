"""Shared settings: one thread, so that timings and sums do not depend on the machine. And `dpulr` run inside the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.small_cli import SMALL, Ended, dpulr

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _grad_mode() -> None:
    """A test that leaves gradients switched off would hide what the next one checks."""
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


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
