"""`gradient`: DP-SGD. Exact gradients by one backward pass to the outputs of the layers (docs/theory.md, section 3).

The weights themselves get no gradient. A layer's rule turns a record's gradient at the output into the norm of its gradient in
the weights, and the clipped sum over the batch into one matrix product: where a rule is known, nothing of size batch x parameters
is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dpulr import validate
from dpulr.accounting.events import GaussianRelease
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import LEAST_BOUND, WITH_MARGIN, Mechanism, SitewiseMechanism, WorstCase
from dpulr.mechanisms.exact_part import ExactPart
from dpulr.mechanisms.scales import Scales, check_quantile, noise_of_votes, trial, typical
from dpulr.model.batches import count
from dpulr.model.differentiable import backward_refusal
from dpulr.model.equal_rows import EqualRows
from dpulr.model.forward import Forward
from dpulr.model.passes import Clean
from dpulr.model.shared_sites import SharedSite
from dpulr.model.signals import Signal
from dpulr.model.sites import Bases, Site, Space
from dpulr.plan import Plan
from dpulr.randomness import Directions

Clipping = Literal["joint", "per-layer", "normalised"]
_STABILITY = 0.01  # of "normalised": what keeps short gradients short
_ADVICE = (
    "Use mechanism='hidden-direction', which needs no gradient; with exact='auto' it takes exact ones where they exist "
    "(HiddenDirection(exact='auto'))."
)


@dataclass(frozen=True)
class Gradient(Mechanism):
    """Settings.

    max_grad_norm  C, the bound on a record's gradient. "adaptive" follows a private quantile of the gradients' lengths, by a noisy
                   count in the same release; the update is then in units of C, so that the learning rate keeps its meaning
    quantile       of "adaptive": the share of records that are not clipped
    clipping       "joint" shortens a record's whole gradient to C; "per-layer" each layer's part to its share of C; "normalised"
                   brings nearly every record to length C ("automatic clipping"): C g / (|g| + 0.01)
    layer_weights  for "per-layer": the shares, one per layer
    """

    max_grad_norm: float | Literal["adaptive"] = 1.0
    clipping: Clipping = "joint"
    layer_weights: tuple[float, ...] | None = None
    quantile: float = 0.95
    name: ClassVar[str] = "gradient"
    takes_weights: ClassVar[bool] = True
    space: ClassVar[Space] = "known-output"  # type: ignore[misc]
    shares_parameters: ClassVar[bool] = True
    bounds_people: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.max_grad_norm, str):
            validate.one_of("max_grad_norm", self.max_grad_norm, ("adaptive",))
            if self.clipping == "normalised":
                raise InvalidArgument("clipping='normalised' clips every record: there is nothing for max_grad_norm='adaptive'.")
        else:
            validate.at_least("max_grad_norm", self.max_grad_norm, LEAST_BOUND)
        check_quantile(self.quantile)
        validate.one_of("clipping", self.clipping, get_args(Clipping))
        if self.layer_weights is not None:
            object.__setattr__(self, "layer_weights", tuple(self.layer_weights))
            if self.clipping != "per-layer":
                raise InvalidArgument("layer_weights are for clipping='per-layer'; otherwise one bound holds for all layers.")

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> GaussianRelease:
        numbers, votes = sum(site.size for site in sites), self.votes(sites)
        if votes:  # two Gaussian parts are one, with the root of the sum of squared shifts
            noise_multiplier = 1 / math.hypot(1 / noise_multiplier, 1 / noise_of_votes(noise_multiplier))
        return GaussianRelease(noise_multiplier, mechanism=self.name, numbers=numbers + votes)

    def for_people(self, most: int) -> Gradient:
        if most > 1 and self.max_grad_norm == "adaptive":
            raise InvalidArgument("max_grad_norm='adaptive' counts records, and a person may have several: use max_per_person=1.")
        return self

    def votes(self, sites: Sequence[Site]) -> int:
        """How many bounds follow the records."""
        if self.max_grad_norm != "adaptive":
            return 0
        return len(sites) if self.clipping == "per-layer" else 1

    @property
    def unit(self) -> float:
        """The bound on what a record adds to a release."""
        return 1.0 if isinstance(self.max_grad_norm, str) else self.max_grad_norm

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
    lifts_nothing = True

    def __init__(self, settings: Gradient, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> None:
        votes, std = settings.votes(forward.sites), plan.noise_multiplier * settings.unit
        super().__init__(forward, plan, noise_std=std, memory_limit=memory_limit, seed=seed, votes=votes)
        self.settings = settings
        self.bounds = self._layer_bounds()
        self._bounds_with_margin = WITH_MARGIN * (self.bounds if settings.clipping == "per-layer" else self.bounds[:1]).unsqueeze(1)
        self.backward_to = [i for members in forward.uses for i in members]
        refusal = backward_refusal(forward, self.backward_to)
        if refusal is not None:
            raise ModelRefused(f"{refusal}. {_ADVICE}")
        self._check_shared()
        if votes:
            self.scales = self._scales(plan)

    def signals(self, clean: Clean, public: Bases, directions: Directions, below: Tensor) -> Iterator[Signal]:
        exact = ExactPart(self.sites, self.forward.uses, clean)
        if self.scales is not None:
            below.copy_(self._compared(exact.norms) <= self.scales.values.unsqueeze(1))
        factors = self.forward.weighed(self.clip_factors(exact.norms), clean.targets)
        yield from exact.signals_times(factors, range(len(self.sites)))

    def _compared(self, norms: Tensor) -> Tensor:
        """(bounds, records): the lengths that are held against a bound: of each layer, or of all together."""
        return norms if self.settings.clipping == "per-layer" else torch.linalg.vector_norm(norms, dim=0, keepdim=True)

    def clip_factors(self, norms: Tensor) -> Tensor:
        """(sites, or 1 for all of them, records): what each record's gradients are multiplied by, given their norms."""
        bounds, norms = self._bounds_with_margin, self._compared(norms)
        if self.scales is not None:
            return bounds / torch.maximum(norms, self.scales.values.unsqueeze(1))
        factors: Tensor = bounds / (norms + _STABILITY) if self.settings.clipping == "normalised" else (bounds / norms).clamp(max=1)
        return factors

    def _check_shared(self) -> None:
        """The uses of shared parameters that were found must be all of them. Tried on synthetic records, against autograd."""
        shared = [(place, site) for place, site in enumerate(self.sites) if isinstance(site, SharedSite)]
        if not shared:
            return
        with torch.random.fork_rng(), EqualRows(count(self.forward.probe[1])):
            (clean,) = self.forward.clean(*self.forward.probe, self.backward_to)
            exact = ExactPart(self.sites, self.forward.uses, clean)
            found = torch.zeros(self.size, device=self.device, dtype=torch.float64)
            for signal in exact.signals_times(torch.ones_like(exact.norms), range(len(self.sites))):
                signal.add_to(self.parts(found))
        expected = self.forward.weight_gradients()
        for place, site in shared:
            own = site.rule.split(self.parts(found)[place])
            for name, parameter in site.parameters.items():
                wanted = expected[parameter].double()
                if not torch.allclose(own[name], wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())):
                    raise ModelRefused(
                        f"parameter '{name}' of {site.label} is used outside of these layers, too (tied by hand, or a penalty in "
                        "the loss). That use would not be trained. Tie it as a parameter of a module, or freeze it."
                    )

    def _layer_bounds(self) -> Tensor:
        """C for every layer; if clipped per layer, C_l with sum C_l^2 = C^2, in proportion to the weights."""
        sites, settings = len(self.sites), self.settings
        if settings.clipping != "per-layer":
            return torch.full((sites,), settings.unit, device=self.device, dtype=self.dtype)
        weights = torch.tensor(settings.layer_weights or [1.0] * sites, dtype=torch.float64)
        if len(weights) != sites or not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise InvalidArgument(f"layer_weights must be {sites} positive numbers, one per layer; got {settings.layer_weights}.")
        return (settings.unit * weights / weights.square().sum().sqrt()).to(self.device, self.dtype)

    def _scales(self, plan: Plan) -> Scales:
        """Bounds that start with the lengths of gradients on synthetic records."""
        with self.forward.checked_mode():
            cleans = trial(self.forward, self.backward_to)
        lengths = [self._compared(ExactPart(self.sites, self.forward.uses, clean).norms) for clean in cleans]
        std, quantile, batch = self.noise_std or 1.0, self.settings.quantile, plan.expected_batch_size
        noise = noise_of_votes(plan.noise_multiplier or 1.0)
        return Scales(typical(lengths, quantile), quantile=quantile, noise_std=std, noise_multiplier=noise, batch=batch)
