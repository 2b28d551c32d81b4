"""`paper`: DP-ULR with the settings of its paper. It has no privacy guarantee: see docs/errata.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from dpulr import validate
from dpulr.errors import InvalidArgument
from dpulr.mechanisms.base import Mechanism, WorstCase
from dpulr.mechanisms.known import register
from dpulr.model.forward import Forward
from dpulr.model.sites import Site, Space
from dpulr.paper.nominal import PaperRelease
from dpulr.paper.plan import PaperPlan
from dpulr.paper.schedules import Schedule, Setting
from dpulr.paper.step import FittedPaper
from dpulr.plan import Plan, Request

Remedy = Literal["auto", "extra-noise", "parameters", "none"]


@register
@dataclass(frozen=True)
class Paper(Mechanism):
    """Settings. Those of type Setting may differ by layer and step: see paper/schedules.py.

    target_std           sigma0; 0 is plain, non-private ULR. None: the engine's noise_multiplier
    repeats              K, perturbations per record and layer
    max_grad_norm        C, the clip bound of each layer; math.inf does not clip, where target_std is 0
    rejection_threshold  N_B: smaller batches are drawn again, and the update is divided by it. None: what the engine was given; if
                         that is none either, nothing is rejected, and the update is divided by the expected batch size.
                         Layers share the batch, so the largest of their thresholds rejects; each divides by its own
    sigma                the largest standard deviation that is injected at a layer's output; over sqrt(fan-in) where parameters are
                         perturbed. The paper does not state its value
    remedy               where the batch's covariance lacks rank: "extra-noise" along its eigenvectors, with sigma as given;
                         "parameters" perturbs the parameters instead (the paper's virtual linear layer); "none" raises an error;
                         "auto" follows eq:sigma in the layers that have full rank and adds extra noise in the others
    simultaneous         noise at all layers in one pass, as ULR does, instead of one layer at a time
    """

    target_std: Setting | None = None
    repeats: Setting = 16
    max_grad_norm: Setting = 1.0
    rejection_threshold: Setting | None = None
    sigma: Setting = 0.5
    remedy: Remedy = "auto"
    simultaneous: bool = False
    space: Space = "output"
    name: ClassVar[str] = "paper"

    def __post_init__(self) -> None:
        validate.one_of("remedy", self.remedy, get_args(Remedy))
        validate.boolean("simultaneous", self.simultaneous)
        if self.remedy == "parameters":
            object.__setattr__(self, "space", "weight")
        validate.one_of("space", self.space, get_args(Space))
        for name, check in _CHECKS.items():
            setting = getattr(self, name)
            if isinstance(setting, int | float | str):
                check(setting)

    def schedules(self, layers: int) -> dict[str, Schedule]:
        """The settings that were given, as one number per layer and step."""
        return {
            name: Schedule(name, setting, layers, check)
            for name, check in _CHECKS.items()
            if (setting := getattr(self, name)) is not None
        }

    def release(self, sites: Sequence[Site], noise_multiplier: float) -> PaperRelease:
        """At the first step. The paper's theorem has one sigma0: the smallest of the layers'."""
        stds = self.schedules(len(sites)).get("target_std")
        return PaperRelease(noise_multiplier if stds is None else min(stds.at(0)), len(sites))

    def passes(self, sites: Sequence[Site]) -> int | None:
        if not isinstance(self.repeats, int):
            return None
        return 1 + self.repeats * (1 if self.simultaneous else len(sites))

    def plan(self, request: Request, sites: Sequence[Site]) -> Plan:
        """Settings of the mechanism may take the place of the engine's, and vary by step."""
        return PaperPlan.of(self.schedules(len(sites)), request, len(sites))

    def fit(self, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> FittedPaper:
        return FittedPaper(self, forward, plan, memory_limit=memory_limit)

    @classmethod
    def worst_case(cls) -> WorstCase:
        """Its noise depends on the whole batch: nothing hurts it more than a feature that nobody else has."""
        return WorstCase(cls(), many_per_step=False, canary="feature", trials=2_000)


def _number(name: str, what: str, least: float, *, whole: bool = False, infinite: bool = False) -> Any:
    def check(value: object) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
        if not good or (math.isinf(value) and not infinite) or (whole and value != int(value)):  # type: ignore[arg-type, call-overload]
            raise InvalidArgument(f"{name} is {value!r}; it must be {what}.")
        return value  # type: ignore[return-value]

    return check


_TINY = math.ulp(0.0)
_CHECKS = {
    "target_std": _number("target_std", "a number of at least 0", 0),
    "repeats": _number("repeats", "a whole number of at least 1", 1, whole=True),
    "max_grad_norm": _number("max_grad_norm", "a positive number", _TINY, infinite=True),
    "rejection_threshold": _number("rejection_threshold", "a whole number of at least 1", 1, whole=True),
    "sigma": _number("sigma", "a positive number", _TINY),
}
