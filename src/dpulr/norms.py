"""Lengths of vectors. One that comes out too short would let a record pass its bound: so they are exact to about 1e-6.

torch adds float32 squares one by one, and over thousands loses the fourth digit. Here at most 128 are added in float32, the rest in
float64. Where the squares of a row leave the range of float32, that row alone is computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_PIECE = 128
_LEAST, _MOST = 1e-10, 1e15


def row_norm(rows: Tensor) -> Tensor:
    """Euclidean norm along the last axis."""
    width = rows.shape[-1]
    if width <= _PIECE or rows.dtype == torch.float64:
        norm: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        return norm
    piece = _piece(width)
    whole = width // piece * piece
    pieces = torch.linalg.vector_norm(rows[..., :whole].reshape(*rows.shape[:-1], whole // piece, piece), dim=-1).double()
    if whole < width:
        rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True).double()
        pieces = torch.cat([pieces, rest], dim=-1)
    combined: Tensor = torch.linalg.vector_norm(pieces, dim=-1).to(rows.dtype)
    return combined


@cache
def _piece(width: int) -> int:
    """How many squares are added in float32: at most 128, and a divisor of the width if there is one that is not small."""
    return next((piece for piece in range(_PIECE, _PIECE // 4, -1) if width % piece == 0), _PIECE)


def safe_row_norm(rows: Tensor) -> Tensor:
    """The same for rows (..., width) of all magnitudes."""
    norm = row_norm(rows)
    if _any_odd(norm):
        odd = ~((norm > _LEAST) & (norm < _MOST))
        norm[odd] = row_norm(rows[odd].double()).to(norm.dtype)
    return norm


def safe_row_norms(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors, records): the same for several (records, width), by fewer operations."""
    norms = torch.stack([row_norm(rows) for rows in tensors])
    return torch.stack([safe_row_norm(rows) for rows in tensors]) if _any_odd(norms) else norms


def _any_odd(norm: Tensor) -> bool:
    """Whether squares may have left the range of float32."""
    if norm.numel() == 0 or norm.dtype == torch.float64:
        return False
    shortest, longest = torch.aminmax(norm)
    return not (shortest.item() > _LEAST and longest.item() < _MOST)


def flat_norm(tensor: Tensor) -> Tensor:
    """Euclidean norm of each record."""
    return row_norm(tensor.flatten(1))
