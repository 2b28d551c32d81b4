"""Where noise goes in: one site per trained layer, in the space of its outputs or of its weights.

A site knows its coordinates: all of its space, or a public random subspace of it, drawn anew in each step. Directions hide inside
the subspace, the release and its noise have its (fewer) coordinates, and the gradient is lifted back (docs/theory.md, section 6).
A signal is (records, dim), a perturbation (repeats, records, dim).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from dpulr import validate
from dpulr.errors import ModelRefused
from dpulr.model.layers import Call, LayerRule, rule_for
from dpulr.model.layers.base import numel
from dpulr.model.trained_layers import Layer
from dpulr.norms import flat_norm, safe_row_norms

Space = Literal["auto", "output", "weight", "known-output"]
"""Where noise goes in. "auto": the smaller space; "known-output": the output wherever a layer has a rule for it."""
_MOST_AHEAD, _NUMBERS_AHEAD = 64, 2**17
SUMMED_TOGETHER = 128
"""Records whose gradients are added in the model's own precision; these sums are added in float64 (docs/theory.md, section 9)."""


def make_site(layer: Layer, output_shape: torch.Size, space: Space = "auto", call: Call | None = None) -> Site:
    """The site of a layer; "auto" takes the smaller of the two spaces."""
    validate.one_of("space", space, get_args(Space))
    rule = rule_for(layer.module, layer.parameters, call)
    if space == "auto":
        space = "output" if rule.has_output_space and numel(output_shape) <= rule.weight_dim else "weight"
    elif space == "known-output":
        space = "output" if rule.has_output_space else "weight"
    if space == "weight":
        return WeightSite(layer, rule, output_shape)
    if not rule.has_output_space:
        raise ModelRefused(
            f"{layer.label} has no output space: its Jacobian is not known. Use space='weight' or 'auto', or register a rule."
        )
    return OutputSite(layer, rule, output_shape)


class Site(ABC):
    """A layer and the space its noise lives in.

    dim     size of the space that directions are hidden in
    size    how many numbers of the release belong to the site
    scale   how far it is moved, relative to a layer's output
    """

    space: ClassVar[str]

    def __init__(self, layer: Layer, rule: LayerRule, output_shape: torch.Size, subspace: int | None = None) -> None:
        self.layer, self.rule, self.output_shape = layer, rule, output_shape
        self.width, self.positions = self._axes()
        self.kept = self.width if subspace is None or not self._reducible else min(subspace, self.width)
        self.reduced = self.kept < self.width
        self.dim = self.kept * self.positions
        self.full_dim = self.width * self.positions
        self.fan_in = max((numel(p.shape[1:]) for p in layer.parameters.values() if p.dim() > 1), default=1)

    def within(self, subspace: int | None) -> Site:
        """The same site with its directions in a public subspace of at most so many dimensions (per position)."""
        return type(self)(self.layer, self.rule, self.output_shape, subspace)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, dim={self.dim})"

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def label(self) -> str:
        return self.layer.label

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.rule.parameters

    # --- coordinates --------------------------------------------------------------------------------------------------
    @abstractmethod
    def _axes(self) -> tuple[int, int]:
        """Size of the axis a subspace is taken of, and how many positions share it."""

    @property
    @abstractmethod
    def _reducible(self) -> bool: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    @abstractmethod
    def scale(self) -> float: ...

    def draw_bases(self, public: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
        """Fresh orthonormal bases (width x kept), uniform and independent of all data. Many at once: that is faster."""
        count = max(1, min(_MOST_AHEAD, _NUMBERS_AHEAD // (self.width * self.kept)))
        normal = torch.randn(count, self.width, self.kept, generator=public, dtype=dtype)
        return list(torch.linalg.qr(normal)[0])

    def perturbation(self, z: Tensor, length: float, basis: Tensor | None) -> Tensor:
        """`length` times the directions (repeats, records, dim), out of the subspace (if there is one) in the site's space."""
        if basis is None:
            return length * z
        return (length * z.reshape(-1, self.kept) @ basis.t()).view(*z.shape[:2], -1)

    # --- passes -------------------------------------------------------------------------------------------------------
    def moved_along(self, call: Call, z: Tensor, length: float, basis: Tensor | None) -> Tensor:
        """Outputs (repeats, records, *out) with the site moved by the perturbation of the directions z."""
        return self.moved(call, self.perturbation(z, length, basis))

    @abstractmethod
    def moved(self, call: Call, delta: Tensor, length: float = 1.0) -> Tensor:
        """Outputs (repeats, records, *out) with the site moved by `length` times `delta`."""

    @abstractmethod
    def moved_both_ways(self, call: Call, delta: Tensor) -> Tensor:
        """Outputs (2 * repeats, records, *out) at plus and at minus the perturbation."""

    @abstractmethod
    def signal_of(self, call: Call, slope: Tensor) -> Tensor:
        """(records, dim): the signal that a gradient at the layer's output stands for."""

    # --- bounds and sums ----------------------------------------------------------------------------------------------
    @abstractmethod
    def norms(self, call: Call, signal: Tensor) -> Tensor:
        """Norm of each record's gradient."""

    @abstractmethod
    def gains(self, call: Call) -> Tensor:
        """For each record a bound on how much longer than its signal its gradient can be."""

    def rows_of_gain(self, call: Call) -> tuple[Tensor, float] | None:
        """What lengths the gains, and with them the norms, are; None where it is not so simple (`LayerRule.rows_of_gain`)."""
        return None

    @abstractmethod
    def add(self, call: Call, signal: Tensor, scale: Tensor, part: Tensor, *, finite: bool = False, exact: bool = False) -> None:
        """Add sum_i scale_i * gradient_i to the site's part of the release. A record that is not finite adds nothing.

        `finite` says that there is none: that saves reading the input once more. `part` is in float64. A few records at a time
        (SUMMED_TOGETHER) are added up in the model's own precision; all is in float64 if that must be `exact`, or where the terms
        of a record may cancel.
        """

    @staticmethod
    def add_record_gradients(gradients: Tensor, scale: Tensor, part: Tensor, *, exact: bool = False) -> None:
        """The same for gradients (records, size) that were made already."""
        scaled = _scaled(gradients, scale, exact)
        part += scaled.masked_fill(~torch.isfinite(scaled).all(1, keepdim=True), 0).sum(0, dtype=part.dtype)

    @abstractmethod
    def lift(self, part: Tensor, basis: Tensor | None, into: dict[str, Tensor]) -> None:
        """Write the gradient that a part of the release stands for."""


class OutputSite(Site):
    """Noise on the layer's output. The release keeps the parameters' shapes, with fewer rows in a subspace."""

    space = "output"
    scale = 1.0

    def __init__(self, layer: Layer, rule: LayerRule, output_shape: torch.Size, subspace: int | None = None) -> None:
        super().__init__(layer, rule, output_shape, subspace)
        self._shapes = {name: self._kept_rows(parameter.shape) for name, parameter in self.parameters.items()}
        self._sizes = [numel(shape) for shape in self._shapes.values()]

    def _axes(self) -> tuple[int, int]:
        return self.output_shape[-1], numel(self.output_shape[:-1])

    @property
    def _reducible(self) -> bool:
        return self.rule.shares_positions

    @property
    def size(self) -> int:
        return sum(self._sizes)

    def _kept_rows(self, shape: torch.Size) -> tuple[int, ...]:
        return (self.kept, *shape[1:]) if self.reduced else tuple(shape)

    def moved_along(self, call: Call, z: Tensor, length: float, basis: Tensor | None) -> Tensor:
        if basis is None:
            return self.moved(call, z, length)
        moved = call.output.reshape(-1, self.width).repeat(z.shape[0], 1)
        return moved.addmm_(z.reshape(-1, self.kept), basis.t(), alpha=length).view(*z.shape[:2], *self.output_shape)

    def moved(self, call: Call, delta: Tensor, length: float = 1.0) -> Tensor:
        return torch.add(call.output, delta.view(*delta.shape[:2], *self.output_shape), alpha=length)

    def moved_both_ways(self, call: Call, delta: Tensor) -> Tensor:
        delta = delta.view(*delta.shape[:2], *self.output_shape)
        pair = delta.new_empty(2, *delta.shape)
        torch.add(call.output, delta, out=pair[0])
        torch.sub(call.output, delta, out=pair[1])
        return pair.flatten(0, 1)

    def signal_of(self, call: Call, slope: Tensor) -> Tensor:
        return slope.flatten(1)

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        return self.rule.norms(call, self.shaped(signal, call))

    def gains(self, call: Call) -> Tensor:
        return self.rule.gains(call)

    def rows_of_gain(self, call: Call) -> tuple[Tensor, float] | None:
        return self.rule.rows_of_gain(call)

    def add(self, call: Call, signal: Tensor, scale: Tensor, part: Tensor, *, finite: bool = False, exact: bool = False) -> None:
        scaled = _scaled(signal, scale, exact)
        if not finite:
            factor = self.rule.factor(call)
            if not math.isfinite((scaled.sum() + factor.sum()).item()):
                good = torch.isfinite(factor.reshape(len(factor), numel(factor.shape[1:]))).all(1)
                bad = ~(good & torch.isfinite(scaled).all(1))
                call, scaled = call.without(bad), scaled.masked_fill(bad.unsqueeze(1), 0)
        if exact or self.rule.sums_positions(call):
            call, scaled = call.doubled(), scaled.double()
        if part.dtype == scaled.dtype:
            self.rule.add_gradient(call, self.shaped(scaled, call), self._views(part))
            return
        self.rule.add_in_parts(call, self.shaped(scaled, call), self._views(part), SUMMED_TOGETHER)

    def lift(self, part: Tensor, basis: Tensor | None, into: dict[str, Tensor]) -> None:
        for name, view in self._views(part).items():
            if basis is None:
                into[name].copy_(view)
            else:
                torch.matmul(basis, view, out=into[name])

    def _views(self, part: Tensor) -> dict[str, Tensor]:
        parts = part.split_with_sizes(self._sizes)
        return {name: view.view(shape) for (name, shape), view in zip(self._shapes.items(), parts, strict=True)}

    def shaped(self, signal: Tensor, call: Call) -> Tensor:
        """A flat signal in the shape of this call's output, of which the last axis may be smaller (a subspace)."""
        lead = call.output.shape[1:-1]
        return signal.view(-1, *lead, signal.shape[1] // numel(lead))


class WeightSite(Site):
    """Noise on the layer's weights: a plain vector. A gradient is the signal itself."""

    space = "weight"
    _reducible = True

    def _axes(self) -> tuple[int, int]:
        return self.rule.weight_dim, 1

    @property
    def size(self) -> int:
        return self.dim

    @property
    def scale(self) -> float:
        """Weights are moved by so much less that the output moves about as far as it does in output space."""
        return 1 / math.sqrt(self.fan_in)

    def moved(self, call: Call, delta: Tensor, length: float = 1.0) -> Tensor:
        return self.rule.with_weights(call, delta if length == 1 else length * delta)

    def moved_both_ways(self, call: Call, delta: Tensor) -> Tensor:
        return torch.cat(self.rule.weight_pair(call, delta))

    def signal_of(self, call: Call, slope: Tensor) -> Tensor:
        return self.rule.record_weight_gradients(call, slope)

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        return flat_norm(signal)

    def gains(self, call: Call) -> Tensor:
        return call.output.new_ones(call.records)

    def add(self, call: Call, signal: Tensor, scale: Tensor, part: Tensor, *, finite: bool = False, exact: bool = False) -> None:
        self.add_record_gradients(signal, scale, part, exact=exact)

    def lift(self, part: Tensor, basis: Tensor | None, into: dict[str, Tensor]) -> None:
        for name, view in self.rule.split(part if basis is None else basis @ part).items():
            into[name].copy_(view)


def _scaled(signal: Tensor, scale: Tensor, exact: bool) -> Tensor:
    """A long vector that cancels with others must not be rounded before it does."""
    return signal.double() * scale.double().unsqueeze(1) if exact else signal * scale.unsqueeze(1)


# --- several sites together: the same numbers by fewer operations ---------------------------------------------------------
def gains_of(sites: Sequence[Site], calls: Sequence[Call]) -> Tensor:
    """(sites, records)."""
    rows = [site.rows_of_gain(call) for site, call in zip(sites, calls, strict=True)]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return torch.stack([site.gains(call) for site, call in zip(sites, calls, strict=True)])
    return _with_constants(safe_row_norms([x for x, _ in known]), [constant for _, constant in known])


def norms_of(sites: Sequence[Site], calls: Sequence[Call], signals: Sequence[Tensor]) -> Tensor:
    """(sites, records): norms of the gradients that these signals stand for."""
    rows = [site.rows_of_gain(call) for site, call in zip(sites, calls, strict=True)]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return torch.stack([site.norms(call, signal) for site, call, signal in zip(sites, calls, signals, strict=True)])
    lengths = safe_row_norms([*(x for x, _ in known), *signals])
    gains = _with_constants(lengths[: len(known)], [constant for _, constant in known])
    return (gains.double() * lengths[len(known) :]).to(lengths.dtype)


def _with_constants(lengths: Tensor, constants: Sequence[float]) -> Tensor:
    if len(set(constants)) == 1:  # the usual case, quicker
        return torch.hypot(lengths, lengths.new_full((), constants[0])) if constants[0] else lengths
    return torch.hypot(lengths, lengths.new_tensor(constants).unsqueeze(1))


Bases = list[Tensor | None]
"""A public basis per site; None where the site keeps all of its space."""


class PublicBases:
    """Draws the bases of a step from public randomness. Some are made in advance; each is used once."""

    def __init__(self, sites: Sequence[Site], public: torch.Generator, dtype: torch.dtype, device: torch.device) -> None:
        self._sites, self._public, self._dtype, self._device = sites, public, dtype, device
        self._ahead: list[list[Tensor]] = [[] for _ in sites]

    def draw(self) -> Bases:
        return [self._next(site, ahead) if site.reduced else None for site, ahead in zip(self._sites, self._ahead, strict=True)]

    def _next(self, site: Site, ahead: list[Tensor]) -> Tensor:
        if not ahead:
            ahead.extend(basis.to(self._device) for basis in site.draw_bases(self._public, self._dtype))
        return ahead.pop()
