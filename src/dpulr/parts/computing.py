"""The state that torch is in while private records are computed on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from dpulr.model.forward import Forward
from dpulr.model.opaque import without_compiling
from dpulr.randomness import RandomSource


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Without gradients, in full precision."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        mixed = torch.is_autocast_enabled(device.type)
        with torch.inference_mode(), torch.autocast(device.type, enabled=False) if mixed else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def trying(forward: Forward) -> Iterator[None]:
    """The same, with the model in the mode that was checked, and nothing private."""
    with (
        warnings.catch_warnings(action="ignore"),
        exact_arithmetic(forward.device),
        forward.checked_mode(),
        without_compiling(forward.model),
    ):
        yield


@contextmanager
def computing(forward: Forward, source: RandomSource) -> Iterator[None]:
    """The same, with the model in the mode that was checked, and with secret randomness in it."""
    with (
        warnings.catch_warnings(action="ignore"),  # what a model warns of, and how often, depends on records
        exact_arithmetic(forward.device),
        forward.checked_mode(),
        without_compiling(forward.model),
        source.model_randomness(forward.device),
    ):
        yield
