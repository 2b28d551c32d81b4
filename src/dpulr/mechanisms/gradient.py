"""`gradient`: DP-SGD. Exact gradients by one backward pass to the outputs of the layers (docs/theory.md, section 3).

The weights themselves get no gradient. A layer's rule turns a record's gradient at the output into the norm of its gradient in
the weights, and the clipped sum over the batch into one matrix product: where a rule is known, nothing of size batch x parameters
is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpulr import validate
from dpulr.accounting.events import GaussianRelease
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN, Batch, Mechanism, SitewiseMechanism, WorstCase
from dpulr.model.batches import copied, count, row
from dpulr.model.equal_rows import EqualRows
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean
from dpulr.model.rescue import each_alone, together_or_apart
from dpulr.model.sites import SUMMED_TOGETHER, Bases, Site, Space
from dpulr.plan import Plan
from dpulr.randomness import Directions

Clipping = Literal["joint", "per-layer", "normalised"]
_STABILITY = 0.01  # of "normalised": what keeps short gradients short


@dataclass(frozen=True)
class Gradient(Mechanism):
    """Settings.

    max_grad_norm  C, the bound on a record's gradient
    clipping       "joint" shortens a record's whole gradient to C; "per-layer" each layer's part to its share of C; "normalised"
                   brings nearly every record to length C ("automatic clipping"): C g / (|g| + 0.01)
    layer_weights  for "per-layer": the shares, one per layer
    """

    max_grad_norm: float = 1.0
    clipping: Clipping = "joint"
    layer_weights: tuple[float, ...] | None = None
    name: ClassVar[str] = "gradient"
    space: ClassVar[Space] = "known-output"  # type: ignore[misc]

    def __post_init__(self) -> None:
        validate.positive("max_grad_norm", self.max_grad_norm)
        validate.one_of("clipping", self.clipping, get_args(Clipping))
        if self.layer_weights is not None:
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
            if self.clipping != "per-layer":
                raise InvalidArgument("layer_weights are for clipping='per-layer'; otherwise one bound holds for all layers.")

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> GaussianRelease:
        return GaussianRelease(noise_multiplier, mechanism=self.name, numbers=sum(site.size for site in sites))

    def passes(self, sites: Sequence[Site]) -> int:
        """The clean pass; the backward pass is none of these."""
        return 1

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedGradient:
        return FittedGradient(self, forward, plan, memory_limit=memory_limit, seed=seed)

    @classmethod
    def worst_case(cls) -> WorstCase:
        """A clipped gradient in one dimension always has the same direction: no attack has it easier."""
        return WorstCase(cls(), dim=1)


class FittedGradient(SitewiseMechanism):
    def __init__(self, settings: Gradient, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        noise_std = plan.noise_multiplier * settings.max_grad_norm
        super().__init__(forward, plan, noise_std=noise_std, subspace=None, memory_limit=memory_limit, seed=seed)
        self.settings = settings
        self.bounds = self._layer_bounds()
        self._check_gradients()

    def sum_of_bounded_signals(self, batch: Batch, public: Bases, directions: Directions) -> Tensor:
        total = torch.zeros(self.size, device=self.device, dtype=torch.float64)
        for chunk in self.chunks.records(batch):
            for part in self.clipped_sums(*chunk):
                total += part
        return total

    def add(self, clean: Clean, public: Bases, directions: Directions, parts: list[Tensor]) -> None:
        raise NotImplementedError("gradients come with their clean pass: see add_clipped.")

    def add_clipped(self, clean: Clean, signals: list[Tensor], parts: list[Tensor]) -> None:
        """Add the records' clipped gradients to the sites' parts of the release."""
        norms = torch.stack([site.norms(call, signal) for site, call, signal in zip(self.sites, clean.calls, signals, strict=True)])
        scales = self.clip_factors(norms)
        for site, call, signal, scale, part in zip(self.sites, clean.calls, signals, scales, parts, strict=True):
            site.add(call, signal, scale, part, precise=self.precise)

    def clip_factors(self, norms: Tensor) -> Tensor:
        """(sites, records): what each record's gradients are multiplied by, given their norms (sites, records)."""
        if self.settings.clipping != "per-layer":
            norms = torch.linalg.vector_norm(norms, dim=0, keepdim=True).expand_as(norms)
        bounds = WITH_MARGIN * self.bounds.unsqueeze(1)
        factors: Tensor = bounds / (norms + _STABILITY) if self.settings.clipping == "normalised" else (bounds / norms).clamp(max=1)
        return factors

    def clipped_sums(self, inputs: Any, targets: Any) -> list[Tensor]:
        """The sum of the clipped gradients: of all records; or of each alone, where that raises or the model reads values."""

        def apart() -> list[Tensor]:
            found: list[Tensor] = []
            each_alone(range(count(targets)), lambda i: found.append(self._clipped_sum(*row((inputs, targets), i))))
            return found

        if self.forward.recordwise:
            return apart()
        return together_or_apart(lambda: [self._clipped_sum(inputs, targets)], apart, lambda: self.forward.check_alive([0]))

    def _clipped_sum(self, inputs: Any, targets: Any) -> Tensor:
        clean, signals = self._backward(inputs, targets)
        few = clean.records <= SUMMED_TOGETHER and not self.precise
        precision = self.dtype if few else torch.float64
        total = torch.zeros(self.size, device=self.device, dtype=precision)
        self.add_clipped(clean, signals, self.parts(total))
        return total

    # --- the backward pass --------------------------------------------------------------------------------------------
    def _backward(self, inputs: Any, targets: Any) -> tuple[Clean, list[Tensor]]:
        with torch.inference_mode(False), torch.enable_grad():
            clean = self.forward.passes.clean(*self._differentiable((inputs, targets)))
            outputs = [call.output for call in clean.calls]
            slopes = torch.autograd.grad(clean.losses.sum(), outputs, allow_unused=True)
        signals = [torch.zeros_like(output) if slope is None else slope for output, slope in zip(outputs, slopes, strict=True)]
        return clean.detached(), [
            site.signal_of(call, signal) for site, call, signal in zip(self.sites, clean.calls, signals, strict=True)
        ]

    @staticmethod
    def _differentiable(batch: Batch) -> Batch:
        """A batch that was made without gradients, as torch.inference_mode does, copied."""
        made_without = any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in pytree.tree_leaves(batch))
        return copied(batch) if made_without else batch

    def _check_gradients(self) -> None:
        """A gradient must reach every site, and a record's must not depend on the others. Tried on synthetic records."""
        advice = "Use mechanism='hidden-direction', which needs no gradient."
        probe, records = self.forward.probe, count(self.forward.probe[1])
        alone = [self._slopes(row(probe, i), advice) for i in range(records)]
        for site, slope in zip(self.sites, alone[0], strict=True):
            if slope is None:
                raise ModelRefused(f"no gradient reaches {site.label}: something behind it can't be differentiated. {advice}")
        if self.forward.recordwise:
            return
        together = self._slopes(probe, advice)
        for index, site in enumerate(self.sites):
            parts = torch.cat([one[index] for one in alone if one[index] is not None])
            if not torch.allclose(
                together[index], parts, rtol=1e-4, atol=1e-6 * max(1.0, float(parts.abs().max())), equal_nan=True
            ):
                raise ModelRefused(f"the backward pass mixes records: what reaches {site.label} depends on the batch. {advice}")

    def _slopes(self, batch: Batch, advice: str) -> Any:
        """Gradients at the outputs of all sites; None where there is none. All rows draw the same random numbers."""
        with torch.inference_mode(False), torch.enable_grad(), EqualRows(count(batch[1])):
            try:
                clean = self.forward.passes.clean(*self._differentiable(batch))
                return torch.autograd.grad(clean.losses.sum(), [call.output for call in clean.calls], allow_unused=True)
            except Exception as problem:
                raise ModelRefused(f"the model can't be differentiated: {problem} {advice}") from problem

    def _layer_bounds(self) -> Tensor:
        """C for every layer; if clipped per layer, C_l with sum C_l^2 = C^2, in proportion to the weights."""
        sites, settings = len(self.sites), self.settings
        if settings.clipping != "per-layer":
            return torch.full((sites,), settings.max_grad_norm, device=self.device, dtype=self.dtype)
        weights = torch.tensor(settings.layer_weights or [1.0] * sites, dtype=torch.float64)
        if len(weights) != sites or not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise InvalidArgument(f"layer_weights must be {sites} positive numbers, one per layer; got {settings.layer_weights}.")
        return (settings.max_grad_norm * weights / weights.square().sum().sqrt()).to(self.device, self.dtype)
