"""Lengths of vectors, exact to the last digits also in millions of dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

_PART = 2**16


def row_norm(rows: Tensor) -> Tensor:
    """Euclidean norm along the last axis, in parts: torch adds floats one by one, and over millions would lose the fifth digit."""
    if rows.shape[-1] <= _PART:
        norm: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        return norm
    parts = [torch.linalg.vector_norm(part, dim=-1) for part in torch.split(rows, _PART, dim=-1)]
    return row_norm(torch.stack(parts, dim=-1))


def flat_norm(tensor: Tensor) -> Tensor:
    """Euclidean norm of each record."""
    return row_norm(tensor.flatten(1))
