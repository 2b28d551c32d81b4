"""Shared settings: one thread and fixed examples: no test depends on the machine or the day. `dpulr` inside the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support.small_cli import SMALL, Ended, dpulr

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


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
