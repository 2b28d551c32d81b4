"""The covariance of a batch's likelihood-ratio gradients, by the block structure of each layer (the paper's eq:sigma).

With v = phi(x; theta) a layer's output and L_0 a record's clean loss, the paper takes L_0^2 J^T J / sigma^2, J = dv/dtheta, as the
covariance of one draw. Seen as (blocks, copies, width), theta has J^T J the same for all copies and zero between blocks: a linear
layer is one block, its outputs are the copies, its inputs (and the constant 1 of the bias) the width. So the sum over the batch is
one width x width matrix a block, a sum of (loss x input) outer products; where there are fewer rows than that, their Gram matrix
has the same spectrum. Nothing of size parameters x parameters is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from dpulr.errors import ModelRefused
from dpulr.model.layers import Call
from dpulr.model.layers.affine import AffineRule, ConvRule
from dpulr.model.layers.base import LayerRule, numel
from dpulr.model.layers.embedding import EmbeddingRule
from dpulr.model.layers.norm import ScaleRule
from dpulr.model.sites import Site, WeightSite

Views = Mapping[str, Tensor]


class Covariance:
    """Sum over the batch of L_0^2 J^T J, kept as its few rows or as a matrix a block, whichever is smaller."""

    def __init__(self, blocks: Blocks, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self.dtype = blocks.width, dtype
        self._rows = torch.zeros(blocks.count, 0, blocks.width, dtype=dtype, device=device)
        self._matrix: Tensor | None = None
        self._decomposed: tuple[Tensor, Tensor] | None = None

    def add_rows(self, rows: Tensor) -> None:
        """Add sum_r rows_r rows_r^T, rows (blocks, any number, width)."""
        rows = rows.to(self.dtype)
        if self.stays_thin(rows.shape[1]):
            self._rows = torch.cat([self._rows, rows], dim=1) if self._rows.shape[1] else rows
        else:
            self.add_matrix(rows.transpose(1, 2) @ rows)

    def add_matrix(self, matrix: Tensor) -> None:
        if self._rows.shape[1]:
            matrix = matrix + self._rows.transpose(1, 2) @ self._rows
            self._rows = self._rows[:, :0]
        self._matrix = matrix if self._matrix is None else self._matrix + matrix

    def stays_thin(self, rows: int) -> bool:
        """Whether it is kept as rows, with so many more of them."""
        return self.thin and self._rows.shape[1] + rows < self.width

    @property
    def thin(self) -> bool:
        """Fewer rows than parameters in a block: rank deficient, whatever the rows are."""
        return self._matrix is None

    def decomposed(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the matrix of each block; if thin, of the Gram matrix of its rows.

        Losses of one batch may differ by ten orders of magnitude. The solver may then fail in float32, and does it in float64.
        """
        if self._decomposed is None:
            if self._matrix is None:
                self._drop_negligible_rows()
            matrix = self._rows @ self._rows.transpose(1, 2) if self._matrix is None else self._matrix
            values, vectors = _eigh(matrix)
            self._decomposed = values.clamp_min(0), vectors
        return self._decomposed

    def _drop_negligible_rows(self) -> None:
        """Leave out rows that together weigh less than the rounding of the largest one: records whose loss is nearly 0."""
        squares = self._rows.square().sum(2).amax(0)
        if squares.numel():
            kept = squares * len(squares) > torch.finfo(squares.dtype).eps * squares.max()
            self._rows = self._rows[:, kept]

    def rank(self) -> int:
        """Of the whole matrix without its copies: eigenvalues that stand out of the rounding."""
        values = self.decomposed()[0]
        if values.numel() == 0:
            return 0
        return int((values > self.width * torch.finfo(values.dtype).eps * values.max()).sum())

    def smallest(self) -> float:
        """The smallest eigenvalue; 0 if the rank is deficient."""
        if self.thin or self.rank() < self.decomposed()[0].numel():
            return 0.0
        return self.decomposed()[0].min().item()

    def extra_noise(self, noise: Tensor, target: float, credit: float) -> Tensor:
        """Standard normal noise (blocks, copies, width), brought to variance max(0, target^2 - credit * value) by eigenvector."""
        if target == 0:
            return torch.zeros_like(noise)
        values, vectors = self.decomposed()
        credited = credit * values
        left = (target**2 - credited).clamp_min(0).sqrt()
        if not self.thin:
            return (noise @ vectors * left.unsqueeze(1)) @ vectors.transpose(1, 2)
        # Eigenvectors are rows^T u / sqrt(value). What is taken off along them, over the value, stays finite where the value is 0.
        off = torch.where(credited < target**2, credit / (target + left), target / values)
        inside = (noise @ self._rows.transpose(1, 2)) @ vectors
        taken = (inside * off.unsqueeze(1)) @ vectors.transpose(1, 2)
        return torch.baddbmm(noise, taken, self._rows, beta=target, alpha=-1)


class Blocks(ABC):
    """A site's parameters as (count, copies, width)."""

    count: int
    copies: int
    width: int

    def __init__(self, site: Site) -> None:
        self.site = site
        self.shapes = {name: parameter.shape for name, parameter in site.parameters.items()}

    @abstractmethod
    def add(self, call: Call, losses: Tensor, covariance: Covariance) -> None:
        """Add the records of a clean pass."""

    @abstractmethod
    def pack(self, views: Views) -> Tensor:
        """Tensors in the shapes of the parameters as (count, copies, width)."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`."""


class RowBlocks(Blocks):
    """Where a record's gradient is sum over positions of signal (outer) row."""

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """(records, count, positions, width) from the layer's input."""

    @abstractmethod
    def signals(self, u: Tensor) -> Tensor:
        """(records, count, positions, copies) from a tensor of the output's shape."""

    def add(self, call: Call, losses: Tensor, covariance: Covariance) -> None:
        rows = self.rows(call.input) * losses.view(-1, 1, 1, 1)
        if not bool(torch.isfinite(rows.sum())):  # such a record adds nothing to the gradient either
            rows = rows.masked_fill(~torch.isfinite(rows).flatten(1).all(1).view(-1, 1, 1, 1), 0)
        covariance.add_rows(rows.transpose(0, 1).flatten(1, 2))

    def _with_bias(self, rows: Tensor) -> Tensor:
        """Append the constant 1 that a bias is multiplied with; without a trained weight it stands alone."""
        if "bias" not in self.shapes:
            return rows
        ones = rows.new_ones(*rows.shape[:-1], 1)
        return torch.cat([rows, ones], dim=-1) if "weight" in self.shapes else ones


class AffineBlocks(RowBlocks):
    """Linear layers and convolutions: a block a group. The rows are inputs, or patches of them."""

    rule: AffineRule

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        assert isinstance(site.rule, AffineRule)
        self.rule = site.rule
        self.count = int(getattr(site.layer.module, "groups", 1))
        outputs = next(iter(self.shapes.values()))[0]
        self.copies = outputs // self.count
        self.inner = numel(self.shapes["weight"][1:]) if "weight" in self.shapes else 0
        self.width = self.inner + ("bias" in self.shapes)

    def rows(self, x: Tensor) -> Tensor:
        return self._with_bias(self.rule.features(x))

    def signals(self, u: Tensor) -> Tensor:
        return self.rule.grouped(u)

    def add(self, call: Call, losses: Tensor, covariance: Covariance) -> None:
        """Patches of a convolution are many: their second moment is added without them."""
        positions = numel(call.output.shape[2:])
        if not isinstance(self.rule, ConvRule) or self.inner == 0 or covariance.stays_thin(call.records * positions):
            super().add(call, losses, covariance)
            return
        x = call.input * losses.view(-1, *[1] * (call.input.dim() - 1))
        if not bool(torch.isfinite(x.sum())):
            bad = ~torch.isfinite(x).flatten(1).all(1) | ~torch.isfinite(losses)
            x, losses = x.masked_fill(bad.view(-1, *[1] * (x.dim() - 1)), 0), losses.masked_fill(bad, 0)
        x, losses = x.to(covariance.dtype), losses.to(covariance.dtype)
        moment = self.rule.second_moment(x)
        if "bias" in self.shapes:
            mean = torch.tensordot(losses, x, 1).unsqueeze(0)
            ones = self.rule.features(mean)[0].sum(1, keepdim=True)
            corner = (losses.square().sum() * positions).expand(self.count, 1, 1)
            moment = torch.cat([torch.cat([moment, ones.transpose(1, 2)], 2), torch.cat([ones, corner], 2)], 1)
        covariance.add_matrix(moment)

    def pack(self, views: Views) -> Tensor:
        parts = [views[name].reshape(self.count, self.copies, -1) for name in ("weight", "bias") if name in views]
        return torch.cat(parts, dim=2)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        parts = {"weight": packed[..., : self.inner], "bias": packed[..., self.inner :]}
        return {name: parts[name].reshape(shape) for name, shape in self.shapes.items()}


class ScaleBlocks(RowBlocks):
    """Normalising layers: a block a feature, its width the scale and the shift."""

    rule: ScaleRule

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        assert isinstance(site.rule, ScaleRule)
        self.rule = site.rule
        self.count = numel(next(iter(self.shapes.values())))
        self.copies, self.width = 1, len(self.shapes)

    def rows(self, x: Tensor) -> Tensor:
        return self._with_bias(self.rule.rows(self.rule.normalised(x)).transpose(1, 2).unsqueeze(3))

    def signals(self, u: Tensor) -> Tensor:
        return self.rule.rows(u).transpose(1, 2).unsqueeze(3)

    def pack(self, views: Views) -> Tensor:
        return torch.stack([views[name].flatten() for name in ("weight", "bias") if name in views], dim=1).unsqueeze(1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        columns = {"weight": 0, "bias": self.width - 1}
        return {name: packed[:, 0, columns[name]].reshape(shape) for name, shape in self.shapes.items()}


class EmbeddingBlocks(Blocks):
    """A block a token: its row gets the signals of the positions where it stands."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.count, self.copies = self.shapes["weight"]
        self.width = 1

    def add(self, call: Call, losses: Tensor, covariance: Covariance) -> None:
        tokens = call.input.reshape(call.records, -1)
        squares = _finite(losses).to(covariance.dtype).square().unsqueeze(1).expand_as(tokens)
        matrix = squares.new_zeros(self.count).index_add_(0, tokens.flatten(), squares.flatten())
        padding = getattr(self.site.layer.module, "padding_idx", None)
        if padding is not None:
            matrix[padding] = matrix.max()  # it is not trained, so it lacks nothing
        covariance.add_matrix(matrix.view(-1, 1, 1))

    def pack(self, views: Views) -> Tensor:
        return views["weight"].unsqueeze(2)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        return {"weight": packed.squeeze(2)}


class WeightBlocks(Blocks):
    """The virtual linear layer: noise on the parameters themselves, J the identity, every record full rank."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.count, self.copies, self.width = 1, site.rule.weight_dim, 1

    def add(self, call: Call, losses: Tensor, covariance: Covariance) -> None:
        covariance.add_matrix(_finite(losses).to(covariance.dtype).square().sum().view(1, 1, 1))

    def pack(self, views: Views) -> Tensor:
        return torch.cat([views[name].flatten() for name in self.shapes]).view(1, -1, 1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        return self.site.rule.split(packed.flatten())


_BLOCKS: dict[type[LayerRule], type[Blocks]] = {
    AffineRule: AffineBlocks,
    ScaleRule: ScaleBlocks,
    EmbeddingRule: EmbeddingBlocks,
}


def blocks_of(site: Site) -> Blocks:
    """The structure of a site's parameters."""
    if isinstance(site, WeightSite):
        return WeightBlocks(site)
    for rule, blocks in _BLOCKS.items():
        if isinstance(site.rule, rule):
            return blocks(site)
    raise ModelRefused(f"{site.label} has a rule of its own, whose covariance is not known. Use remedy='parameters'.")


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    with suppress(RuntimeError):  # torch's LinAlgError is one
        values, vectors = torch.linalg.eigh(matrix)
        if bool(torch.isfinite(values.sum() + vectors.sum())):
            return values, vectors
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def _finite(losses: Tensor) -> Tensor:
    return torch.where(torch.isfinite(losses), losses, 0)
