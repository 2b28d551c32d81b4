"""Lengths of vectors. One that comes out too short would let a record pass its bound: so they are exact to about 1e-6.

torch adds float32 squares one by one, and over thousands loses the fourth digit. Here at most 64 are added in float32, the rest in
float64. Where the squares of a row leave the range of float32, that row alone is computed in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 64
_LEAST, _MOST = 1e-10, 1e15


def row_norm(rows: Tensor) -> Tensor:
    """Euclidean norm along the last axis."""
    width = rows.shape[-1]
    whole = width // _PIECE * _PIECE
    if width <= _PIECE or rows.dtype == torch.float64:
        norm: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        return norm
    pieces = torch.linalg.vector_norm(rows[..., :whole].reshape(*rows.shape[:-1], whole // _PIECE, _PIECE), dim=-1).double()
    if whole < width:
        rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True).double()
        pieces = torch.cat([pieces, rest], dim=-1)
    combined: Tensor = torch.linalg.vector_norm(pieces, dim=-1).to(rows.dtype)
    return combined


def safe_row_norm(rows: Tensor) -> Tensor:
    """The same for rows (any, any, width) of all magnitudes."""
    norm = row_norm(rows)
    if norm.numel() and norm.dtype != torch.float64:
        shortest, longest = torch.aminmax(norm)
        if not (shortest.item() > _LEAST and longest.item() < _MOST):
            odd = ~((norm > _LEAST) & (norm < _MOST))
            norm[odd] = row_norm(rows[odd].double()).to(norm.dtype)
    return norm


def flat_norm(tensor: Tensor) -> Tensor:
    """Euclidean norm of each record."""
    return row_norm(tensor.flatten(1))
