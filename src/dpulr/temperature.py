"""A temperature for a trained classifier: what its outputs are divided by, so that its probabilities are as sure as they may be.

It is fitted on the private records, after training, by one Gaussian release over all of them: how the loss of each changes with the
temperature, at a few temperatures. That release is charged like a step, and takes what is left of the budget.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dpulr import accounting
from dpulr.accounting.events import Charge, GaussianRelease, SampledStep
from dpulr.engine import PrivacyEngine
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.model.batches import call_on_copy, count
from dpulr.search import boundary

NAME = "temperature"
TEMPERATURES = tuple(2.0 ** (k / 2) for k in range(-4, 11))
_LONGEST = 5.0
"""A record's slope at one temperature is clipped there: few have more, where the probabilities are about right."""
_LEAST_NOISE, _MOST_NOISE = 0.5, 1e4


class Tempered(nn.Module):
    """A model whose outputs are divided by a temperature."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named) / self.temperature


def tempered(model: nn.Module, temperature: float) -> nn.Module:
    """The model itself where there is nothing to divide."""
    return model if temperature == 1 else Tempered(model, temperature)


def fit_temperature(engine: PrivacyEngine, *, target_epsilon: float) -> float:
    """The temperature of the engine's model, for what is left of `target_epsilon`. The model must give one output per class."""
    check_classifier(engine)
    release = _affordable(engine, target_epsilon)
    bound = _LONGEST * math.sqrt(len(TEMPERATURES))
    slopes = engine.release_sum(
        lambda batch: slopes_of(call_on_copy(engine.forward.model, batch[0]), batch[1]), bound=bound, release=release
    )
    return lowest(slopes)


def slopes_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """(records, temperatures): by how much a record's cross-entropy grows per growth of the temperature's logarithm, clipped."""
    z = outputs.double()
    own = z.gather(1, targets.long().unsqueeze(1))
    columns = []
    for temperature in TEMPERATURES:
        mean = ((z / temperature).softmax(1) * z).sum(1, keepdim=True)
        columns.append((own - mean) / temperature)
    return torch.cat(columns, dim=1).clamp(-_LONGEST, _LONGEST)


def lowest(slopes: Tensor) -> float:
    """Where the loss is lowest, given its (noisy) slopes at all temperatures: first among these, then between two of them."""
    s = [float(slope) for slope in slopes]
    heights = [0.0]
    for left, right in pairwise(s):
        heights.append(heights[-1] + left + right)
    at = min(range(len(s)), key=heights.__getitem__)
    place, other = float(at), at + 1 if s[at] < 0 else at - 1
    if 0 <= other < len(s) and s[at] * s[other] < 0:
        place += (other - at) * s[at] / (s[at] - s[other])
    return math.exp(math.log(TEMPERATURES[0]) + place * math.log(TEMPERATURES[1] / TEMPERATURES[0]))


def is_temperature(step: object) -> bool:
    """Whether a charge was for a temperature."""
    return isinstance(step, SampledStep) and getattr(step.release, "mechanism", "") == NAME


def _affordable(engine: PrivacyEngine, target_epsilon: float) -> GaussianRelease:
    """The release with the least noise that fits into the budget, on top of all that is charged."""

    def release(noise: float) -> GaussianRelease:
        return GaussianRelease(noise, mechanism=NAME, numbers=len(TEMPERATURES))

    def exceeds(log_noise: float) -> bool:
        step = SampledStep(release(math.exp(log_noise)), 1.0)
        return accounting.epsilon([*engine.ledger.charges, Charge(step, 1)], engine.target_delta) > target_epsilon

    if engine.guarantee != "certified":
        return release(1.0)  # nothing is claimed, whatever the noise
    if exceeds(math.log(_MOST_NOISE)):
        raise BudgetError(f"nothing is left of epsilon {target_epsilon:g} for a temperature.")
    if not exceeds(math.log(_LEAST_NOISE)):
        return release(_LEAST_NOISE)
    return release(math.exp(boundary(exceeds, math.log(_LEAST_NOISE), math.log(_MOST_NOISE), 0.01)[1]))


def check_classifier(engine: PrivacyEngine) -> None:
    """On synthetic records: the outputs must be one per class."""
    inputs, targets = engine.forward.probe
    with torch.inference_mode(), engine.forward.checked_mode():
        outputs: Any = call_on_copy(engine.model, inputs)
    fits = isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1
    if not fits or not isinstance(targets, Tensor) or targets.shape != (count(targets),) or targets.is_floating_point():
        raise InvalidArgument("a temperature is for classifiers: one output per class, and targets that are whole numbers.")
