"""The coordinates a site's directions and its part of the release live in: the whole space, or a public random subspace of it.

A subspace is drawn for each step from public randomness. Directions are hidden inside it, the release and its noise have its
(fewer) coordinates, and the gradient is lifted back (docs/theory.md, section 6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpulr.model.layers import Call
from dpulr.model.layers.base import numel
from dpulr.model.sites import Site


class Coordinates:
    """Coordinates of one site. `dim` is the size of the space that directions are hidden in, `size` that of the release."""

    def __init__(self, site: Site, subspace: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self.site = site
        self.dtype, self.device = dtype, device
        self.width, self.positions = self._axes()
        self.kept = self.width if subspace is None or not self.reducible else min(subspace, self.width)
        self.reduced = self.kept < self.width
        self.dim = self.kept * self.positions
        self.shapes = {name: torch.Size(self._shape(p.shape)) for name, p in site.parameters.items()} if self._by_rows else {}
        self.size = sum(numel(shape) for shape in self.shapes.values()) if self._by_rows else self.dim
        self._sizes = [numel(shape) for shape in self.shapes.values()]
        self.basis = torch.empty(0)
        self._ahead: list[Tensor] = []

    @property
    def _by_rows(self) -> bool:
        """In output space the release keeps the parameters' shapes, with fewer rows; in weight space it is a plain vector."""
        return self.site.space == "output"

    @property
    def reducible(self) -> bool:
        return self.site.space == "weight" or self.site.rule.shares_positions

    def _axes(self) -> tuple[int, int]:
        """Size of the axis a subspace is taken of, and how many positions share it."""
        if self.site.space == "weight":
            return self.site.dim, 1
        width = self.site.output_shape[-1]
        return width, self.site.dim // width

    def _shape(self, shape: torch.Size) -> tuple[int, ...]:
        return (self.kept, *shape[1:]) if self.reduced else tuple(shape)

    def draw(self, public: torch.Generator) -> None:
        """A fresh orthonormal basis (width x kept): uniform, and independent of all data. Many are made at once: that is faster."""
        if not self.reduced:
            return
        if not self._ahead:
            count = max(1, min(_MOST_AHEAD, _NUMBERS_AHEAD // (self.width * self.kept)))
            normal = torch.randn(count, self.width, self.kept, generator=public, dtype=self.dtype)
            self._ahead = list(torch.linalg.qr(normal)[0].to(self.device))
        self.basis = self._ahead.pop()

    def perturbation(self, z: Tensor, radius: float) -> Tensor:
        """`radius` times the directions (repeats, records, dim), in the coordinates of the site."""
        if not self.reduced:
            return radius * z
        rows = z.reshape(-1, self.kept)
        return (radius * rows @ self.basis.t()).view(*z.shape[:2], -1)

    def add(self, call: Call, signal: Tensor, scale: Tensor, part: Tensor, *, finite: bool = False) -> None:
        """Add the records' scaled gradients, in these coordinates, to their part of the release."""
        if self._by_rows:
            self.site.add_gradient(call, signal, scale, self._views(part), finite=finite)
        else:
            self.site.add_weight_signal(signal, scale, part)

    def lift(self, part: Tensor, into: dict[str, Tensor]) -> None:
        """Write the gradient that a part of the release stands for."""
        if self._by_rows:
            for name, view in self._views(part).items():
                if self.reduced:
                    torch.matmul(self.basis, view, out=into[name])
                else:
                    into[name].copy_(view)
            return
        flat = self.basis @ part if self.reduced else part
        for name, view in self.site.rule.split(flat).items():
            into[name].copy_(view)

    def _views(self, part: Tensor) -> dict[str, Tensor]:
        parts = part.split_with_sizes(self._sizes)
        return {name: view.view(shape) for (name, shape), view in zip(self.shapes.items(), parts, strict=True)}


_MOST_AHEAD, _NUMBERS_AHEAD = 64, 2**17
