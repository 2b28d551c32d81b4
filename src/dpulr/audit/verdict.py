"""From scores to a verdict: thresholds chosen on one half of the trials, counts taken on the other, every choice paid for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dpulr.accounting.rounding import down
from dpulr.accounting.rounding import up as rounded_up
from dpulr.audit.attacks import Attack
from dpulr.audit.bounds import Array, epsilon_from_rates, lower_rate, upper_rate
from dpulr.audit.claims import FINEST, LEAST, Claim, largest_refuted, refuted, scaled

_CANDIDATES = 400  # thresholds looked at on the first half
_ROC_POINTS = 100
_DELTAS = tuple(np.geomspace(1e-5, 0.9, 60).tolist())


@dataclass(frozen=True)
class Verdict:
    """What was claimed, what was measured, and how sure that is.

    lower_bound     epsilon at `delta` is at least this, whatever the mechanism does
    curve_bound     epsilon at `delta` of the claim with `noise_factor` times its noise, which is refuted: a lower bound if the
                    truth is the mechanism of the claim with some noise or other
    proof           (delta, claimed epsilon, lower bound above it) of a refuted claim: at `delta`, or else where the gap is widest
    broken          there is such a proof, at `confidence`
    trials          releases of each kind, with the canary and without; half of them choose the attack
    """

    mechanism: str
    canary: str
    claimed_epsilon: float
    delta: float
    lower_bound: float
    curve_bound: float
    noise_factor: float | None
    broken: bool
    proof: tuple[float, float, float] | None
    confidence: float
    trials: int
    attack: str
    tests: int
    game: str = "one step"
    nominal: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    roc: list[tuple[float, float]] = field(default_factory=list, repr=False)
    allowed: list[tuple[float, float]] = field(default_factory=list, repr=False)
    seconds: float = 0.0

    @property
    def measured(self) -> float:
        """What the verdict names: for a refuted claim only what holds whatever the truth is."""
        return max(self.lower_bound, self.curve_bound) if self.proof is None else self.proof[2]

    def __str__(self) -> str:
        if self.proof is None:
            return f"holds (measured {down(self.measured)} of {rounded_up(self.claimed_epsilon, 3)})"
        delta, claimed, bound = self.proof
        where = "" if delta == self.delta else f" at delta {delta:.3g}"
        return f"BROKEN: {'nominally ' if self.nominal else ''}claims {rounded_up(claimed, 3)}{where}, at least {down(bound)}"

    def details(self) -> str:
        """The lines below the verdict."""
        trials = f"{self.trials:,} with the canary, {self.trials:,} without; half to choose, half to count"
        if self.game == "one run":
            fit, trials = "", f"{self.trials:,} canaries in one run, each in or out by a coin"
        elif self.noise_factor is None:
            fit = "no claim of this kind is refuted"
        else:
            fit = f"{down(self.curve_bound)} if only the noise is unknown (at most {self.noise_factor:.3g} times what is claimed)"
            if self.noise_factor == 2.0 ** (LEAST / FINEST):
                fit += "; less was not tried"
        lines = [
            f"{self.mechanism}, {self.game}, canary: {self.canary}, delta {self.delta:g}",
            f"claimed epsilon    {rounded_up(self.claimed_epsilon, 3)}{' (nominal: not proved)' if self.nominal else ''}",
            f"measured           {down(self.lower_bound)} whatever the truth is",
            *([f"                   {fit}"] if fit else []),
            f"confidence         {self.confidence:.6g}, all {self.tests} tests together",
            f"trials             {trials}",
            f"best attack        {self.attack}",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": str(self), **_finite(asdict(self)), "measured": _finite(self.measured)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class _Test:
    attack: str
    false_positive: float
    true_positive: float


def judge(
    out: Array,
    inside: Array,
    attacks: Sequence[Attack],
    claim: Claim,
    *,
    mechanism: str,
    canary: str,
    delta: float = 1e-5,
    confidence: float = 0.95,
    game: str = "one step",
    settings: dict[str, Any] | None = None,
    seconds: float = 0.0,
) -> Verdict:
    """Hold features of releases without (`out`) and with the canary (`inside`) against a claim."""
    half_out, half_in = len(out) // 2, len(inside) // 2
    tests = 2 * len(attacks)  # two thresholds for each attack: one for each bound
    risk = (1 - confidence) / (2 * tests)  # a test takes two limits
    results, curves = [], {}
    for attack in attacks:
        score = attack.fit(out[:half_out], inside[:half_in])
        chosen = _thresholds(score(out[:half_out]), score(inside[:half_in]), claim, delta, risk)
        test_out, test_in = score(out[half_out:]), score(inside[half_in:])
        for threshold in chosen:
            fpr = upper_rate(np.count_nonzero(test_out > threshold), len(test_out), risk)
            tpr = lower_rate(np.count_nonzero(test_in > threshold), len(test_in), risk)
            results.append(_Test(attack.name, float(fpr), float(tpr)))
        curves[attack.name] = (test_out, test_in)
    fpr, tpr = np.array([t.false_positive for t in results]), np.array([t.true_positive for t in results])
    direct = epsilon_from_rates(fpr, tpr, delta)
    found = largest_refuted(claim, fpr, tpr)
    curve_bound = 0.0 if found is None else scaled(claim, found[0]).epsilon(delta)
    claimed = claim.epsilon(delta)
    suspect = bool((refuted(claim, fpr, tpr) > 0).any() or direct.max() > claimed)
    proof = _proof(claim, fpr, tpr, delta) if suspect else None
    if proof is None:  # one direction of the curve alone is no epsilon: nothing above the claim is said without a proof
        curve_bound = min(curve_bound, claimed)
    best = results[found[1] if found is not None and curve_bound >= direct.max() else int(direct.argmax())].attack
    return Verdict(
        mechanism=mechanism,
        canary=canary,
        claimed_epsilon=claimed,
        delta=delta,
        lower_bound=float(direct.max()),
        curve_bound=curve_bound,
        noise_factor=None if found is None else 2.0 ** (found[0] / FINEST),
        broken=proof is not None,
        proof=proof,
        confidence=confidence,
        trials=min(len(out), len(inside)),
        attack=best,
        tests=tests,
        game=game,
        nominal=claim.nominal,
        settings=settings or {},
        roc=rates(*curves[best]),
        allowed=allowed(claim),
        seconds=round(seconds, 2),
    )


def _proof(claim: Claim, fpr: Array, tpr: Array, delta: float) -> tuple[float, float, float] | None:
    """At `delta` if that suffices; else at the delta where the bound exceeds the claim most; None if it does so nowhere.

    The limits on the rates hold together, so looking at many deltas costs nothing.
    """
    rows = []
    for point in [delta, *_DELTAS]:
        claimed, bound = claim.epsilon(point), float(epsilon_from_rates(fpr, tpr, point).max())
        if bound > claimed and point == delta:
            return delta, claimed, bound
        rows.append((bound - claimed, (point, claimed, bound)))
    gap, proof = max(rows)
    return proof if gap > 0 else None


def _thresholds(out: Array, inside: Array, claim: Claim, delta: float, risk: float) -> tuple[float, float]:
    """The thresholds that promise most, by what they would have proved on these (first half) scores."""
    pooled = np.unique(np.concatenate([_quantiles(out), _quantiles(inside)]))
    cuts = (pooled[1:] + pooled[:-1]) / 2 if len(pooled) > 1 else pooled
    fpr = upper_rate(len(out) - np.searchsorted(np.sort(out), cuts, side="right"), len(out), risk)
    tpr = lower_rate(len(inside) - np.searchsorted(np.sort(inside), cuts, side="right"), len(inside), risk)
    direct = epsilon_from_rates(fpr, tpr, delta)
    found = largest_refuted(claim, fpr, tpr)
    curve = int((tpr - fpr).argmax()) if found is None else found[1]
    return float(cuts[int(direct.argmax())]), float(cuts[curve])


def _quantiles(scores: Array) -> Array:
    """Quantiles, closer together in the tails."""
    tails = np.geomspace(1 / len(scores), 0.5, _CANDIDATES // 4)
    found: Array = np.quantile(scores, np.concatenate([[0.0], tails, 1 - tails, [1.0]]))
    return found


def rates(out: Array, inside: Array) -> list[tuple[float, float]]:
    """(false positives, true positives) of a score, as seen."""
    cuts = np.unique(np.concatenate([_quantiles(out), _quantiles(inside)]))
    fpr = 1 - np.searchsorted(np.sort(out), cuts, side="right") / len(out)
    tpr = 1 - np.searchsorted(np.sort(inside), cuts, side="right") / len(inside)
    step = max(1, len(cuts) // _ROC_POINTS)
    points = sorted(zip(fpr[::step].tolist(), tpr[::step].tolist(), strict=True))
    return [(0.0, 0.0), *points, (1.0, 1.0)]


def allowed(claim: Claim) -> list[tuple[float, float]]:
    """The largest power that the claim allows, as a curve."""
    fpr = np.concatenate([[0.0], np.geomspace(1e-6, 0.01, 50), np.linspace(0.02, 1.0, 99)])
    return list(zip(fpr.tolist(), claim.power(fpr).tolist(), strict=True))
