"""What a model is tried on before it is trained: synthetic batches of two sizes, and other weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpulr.model.batches import synthetic
from dpulr.model.moved_weights import blocks_of, put_back_later

Probe = tuple[Any, Any]
PROBE_SIZES = (2, 3)
SEED = 20_240_301  # public: only synthetic inputs depend on it
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
"""How near losses must be that should be equal."""
_SEED_OF_WEIGHTS = 20_240_229


def probes_of(example: tuple[Any, Any], device: torch.device) -> list[Probe]:
    """A synthetic batch of each size. Of `example`, a batch of one record, only shapes and types are used."""
    generator = torch.Generator().manual_seed(SEED)
    return [synthetic(example, size, generator, device) for size in PROBE_SIZES]


@contextmanager
def other_weights(weights: Iterable[nn.Parameter], *, keep: float, noise: float = 0.5) -> Iterator[None]:
    """The model with `keep` times these weights plus noise, for a while: what a layer that starts at zero hides shows here."""
    generator = torch.Generator().manual_seed(_SEED_OF_WEIGHTS)
    parameters = [p for p in weights if p.is_floating_point()]
    with put_back_later(parameters):
        with torch.no_grad():
            for p in parameters:
                std = noise / max(1, p[0].numel() if p.dim() > 1 else 1) ** 0.5
                for block in blocks_of(p):  # a large table is not held twice
                    block.mul_(keep).add_(torch.randn(block.shape, generator=generator, dtype=p.dtype).to(p.device), alpha=std)
        yield
