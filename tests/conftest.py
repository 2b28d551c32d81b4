"""Shared settings: one thread, so that timings and sums do not depend on the machine."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _grad_mode() -> None:
    """A test that leaves gradients switched off would hide what the next one checks."""
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
