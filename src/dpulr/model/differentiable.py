"""Where a backward pass may be believed: autograd's gradient at a layer's output, held against differences of the loss.

Everything here is tried on synthetic records and with weights of its own, so that nothing private decides it. A surrogate or
straight-through gradient, a step function and a box that autograd can't see all have a gradient that the loss does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpulr.errors import ModelRefused
from dpulr.model.batches import count, row
from dpulr.model.equal_rows import EqualRows
from dpulr.model.forward import Forward
from dpulr.model.passes import Move
from dpulr.model.trials import other_weights

_SEED = 20_240_304  # public: only synthetic directions depend on it
_LINES, _POINTS, _REACH = 4, 16, 0.3
"""Lines through a layer's output, points on each, and how far they reach by coordinate: so far that a sign or a spike shows."""
_TOLERANCE = 0.2  # how far the slopes may be from the differences: sixteen points on a line meet a kink about so well
_ROUNDING = 4.0  # times the precision of a loss: differences below that say nothing


@dataclass(frozen=True)
class Judgement:
    """What was found of one layer. `refusal`: why no backward pass can reach it; `doubt`: why its gradient is not the loss's."""

    refusal: str | None = None
    doubt: str | None = None

    @property
    def exact(self) -> bool:
        return self.refusal is None and self.doubt is None

    @property
    def reason(self) -> str:
        return self.refusal or self.doubt or ""


def judge(forward: Forward, uses: Sequence[int]) -> Judgement:
    """Whether a backward pass gives the gradient of the loss at the output of this layer, in each of its calls."""
    refusal = backward_refusal(forward, uses)
    return Judgement(refusal, None if refusal else next(filter(None, (_disagreement(forward, i) for i in uses)), None))


def exact_layers(forward: Forward) -> dict[str, Judgement]:
    """Each layer, by its name, judged alone."""
    return {site.name: judge(forward, uses) for site, uses in zip(forward.sites, forward.uses, strict=True)}


def backward_refusal(forward: Forward, indices: Sequence[int]) -> str | None:
    """Why no backward pass can be made to these layers, in words; None if it can, and a record's depends on that record alone."""
    probe, records = forward.probe, count(forward.probe[1])
    try:
        alone = [_slopes(forward, row(probe, i), indices) for i in range(records)]
        together = alone[0] if forward.recordwise else _slopes(forward, probe, indices)
    except ModelRefused:
        raise
    except Exception as problem:
        where = f" behind {forward.passes.layers[indices[0]].label}" if len(indices) == 1 else ""
        said = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        return f"the model can't be differentiated{where}: {said}"
    for place, index in enumerate(indices):
        label = forward.passes.layers[index].label
        found = [one[place] for one in alone]
        if any(slope is None for slope in found):
            return f"no gradient reaches {label}: something behind it can't be differentiated"
        if forward.recordwise:
            continue
        parts = torch.cat([slope for slope in found if slope is not None])
        whole = together[place]
        largest = max(1.0, float(parts.abs().max()))
        if whole is None or not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6 * largest, equal_nan=True):
            return f"the backward pass mixes records: what reaches {label} depends on the batch"
    return None


def _slopes(forward: Forward, batch: tuple[object, object], indices: Sequence[int]) -> list[Tensor | None]:
    """Gradients at the outputs of these layers; None where there is none. All rows draw the same random numbers."""
    with torch.random.fork_rng(), EqualRows(count(batch[1])):
        return forward.differentiated(batch, indices)[1]


def _disagreement(forward: Forward, index: int) -> str | None:
    """Why autograd's gradient at a layer's output is not that of the loss, in words.

    Along a line, the slopes add up to the difference of the losses at its ends: for a kink, too, but not for a jump, or for what
    autograd does not see.
    """
    label = forward.passes.layers[index].label
    try:
        with other_weights(forward.parameters(), keep=1.0), torch.random.fork_rng():
            compared = [_along_lines(forward, row(forward.probe, i), index) for i in range(count(forward.probe[1]))]
    except Exception as problem:  # with other weights a black box may raise
        return f"{label} could not be tried: {type(problem).__name__}"
    slopes, differences, rounding = (torch.cat(parts) for parts in zip(*compared, strict=True))
    floor, size = float(rounding.norm()), float(differences.norm())
    if not float((slopes - differences).norm()) <= _TOLERANCE * size + floor:
        return f"the gradient that torch gives for {label} is not that of the loss (a step, a box or a surrogate lies behind it)"
    return None if size > floor else f"nothing that {label} puts out moves the loss of a synthetic record"


def _along_lines(forward: Forward, batch: tuple[object, object], index: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each line: the mean of the slopes along it by autograd, by the losses at its ends, and how much may be rounding."""
    with EqualRows(1, counted=False), torch.no_grad():
        clean = forward.passes.clean(*batch)
    output = clean.calls[index].output
    line = torch.randn(_LINES, *output.shape, generator=torch.Generator().manual_seed(_SEED), dtype=output.dtype).to(output.device)
    places = (2 * torch.arange(_POINTS, device=output.device, dtype=output.dtype) + 1) / _POINTS - 1
    steps = torch.cat([places, places.new_tensor([1.0, -1.0])]) * _REACH  # the middles of equal pieces, and both ends
    moved = (output + line.unsqueeze(1) * steps.view(1, -1, *[1] * output.dim())).flatten(0, 1)
    with forward.passes.recorded([]), EqualRows(len(moved), counted=False):
        moved.requires_grad_()
        losses = forward.passes.losses(clean, [Move(index, moved.clone())])[0, :, 0]
        (slope,) = torch.autograd.grad(losses.sum(), moved)
    along = (slope.view(_LINES, -1, *output.shape) * line.unsqueeze(1)).flatten(2).sum(2)[:, :_POINTS].double().mean(1)
    ends = losses.detach().view(_LINES, -1)[:, _POINTS:].double()
    precision = torch.finfo(losses.dtype).eps * ends.abs().amax(1).clamp_min(1)
    return along, (ends[:, 0] - ends[:, 1]) / (2 * _REACH), _ROUNDING * precision / _REACH
