"""A plan whose noise and threshold may vary by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dpulr.errors import BudgetError, InvalidArgument
from dpulr.paper.nominal import PaperRelease
from dpulr.paper.schedules import Schedule
from dpulr.plan import Plan, Request, plan_of, sampled_step
from dpulr.sampling import PoissonSampling


@dataclass(frozen=True)
class PaperPlan(Plan):
    """A plan whose noise and threshold may vary by step."""

    request: Request | None = None
    layers: int = 1
    target_std: Schedule | None = None
    own_threshold: Schedule | None = None

    @classmethod
    def of(cls, schedules: Mapping[str, Schedule], request: Request, layers: int) -> PaperPlan:
        stds, thresholds = schedules.get("target_std"), schedules.get("rejection_threshold")
        if request.target_epsilon is not None:
            raise BudgetError(
                "paper has no certified epsilon: no target_epsilon can be met. Give noise_multiplier (the paper's sigma0)."
            )
        if stds is None and request.noise_multiplier is None:
            raise InvalidArgument("paper needs noise_multiplier (the paper's sigma0; 0 for plain ULR).")
        if stds is not None and request.noise_multiplier not in (None, min(stds.at(0))):
            raise InvalidArgument(
                f"the mechanism has target_std {min(stds.at(0)):g} and noise_multiplier is {request.noise_multiplier:g}: "
                "give one of the two."
            )
        if request.rejection_threshold == "auto":
            raise InvalidArgument("rejection_threshold='auto' weighs epsilon, and paper has none: give a number.")
        if thresholds is not None:
            if request.rejection_threshold not in (0, int(max(thresholds.at(0)))):
                raise InvalidArgument("the mechanism and the engine have different rejection thresholds: give one of the two.")
            if request.sampling == "shuffle":
                raise InvalidArgument("shuffled batches have a fixed size of at least 1: there is nothing to reject.")
        plain = plan_of(request, float(request.noise_multiplier or 0), int(request.rejection_threshold), None, None)
        first = cls(**vars(plain), request=request, layers=layers, target_std=stds, own_threshold=thresholds)
        return first.at(0)

    def at(self, step: int) -> PaperPlan:
        """What holds in a step. The smallest sigma0 of the layers is the one that is charged."""
        stds = (self.noise_multiplier,) if self.target_std is None else self.target_std.at(step)
        threshold = self.rejection_threshold if self.own_threshold is None else int(max(self.own_threshold.at(step)))
        assert self.request is not None
        if self.own_threshold is not None:
            PoissonSampling(self.sample_rate, threshold).check(self.min_dataset_size)
        released, void = None, None
        if min(stds) > 0:
            released = sampled_step(self.request, self._release(min(stds)), threshold)
        else:
            void = "no noise was added to some layers" if any(stds) else "no noise was added"
        return replace(self, noise_multiplier=min(stds), rejection_threshold=threshold, step=released, void=void)

    def _release(self, target_std: float) -> PaperRelease:
        """What voids other mechanisms is a reason here: the formula still has a value, if no meaning."""
        assert self.request is not None
        reason = self.request.reason_for_none
        return PaperRelease(target_std, self.layers, () if reason is None else (reason,))
