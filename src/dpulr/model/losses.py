"""Loss functions: one value per record. None needs a gradient, so counts of errors are losses like any other.

A difference of two 0-1 losses is -1, 0 or 1: hidden-direction's bit is then all there is to know. A loss of your own that works on
arrays, or by another program, is `dpulr.BlackBox(function, output_shape=())`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[[Any, Any], Tensor]
_FEW_CLASSES = 64


def zero_one(output: Tensor, target: Tensor) -> Tensor:
    """1 for each record whose highest score is not its label's."""
    return (output.argmax(1) != target).to(output.dtype)


def top_k(k: int) -> LossFunction:
    """1 for each record whose label is not among its k highest scores."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.topk(k, dim=1).indices != target.unsqueeze(1)).all(1).to(output.dtype)

    return loss


def exact_match(output: Tensor, target: Tensor) -> Tensor:
    """1 for each record with a wrong token. Scores (records, positions, tokens), targets (records, positions)."""
    return (output.argmax(-1) != target).any(1).to(output.dtype)


def edit_distance(output: Tensor, target: Tensor) -> Tensor:
    """Insertions, deletions and replacements between the tokens of highest score and the targets, which may differ in length.

    Scores (records, positions, tokens), targets (records, length).
    """
    found = output.argmax(-1)
    row = [output.new_full((len(found),), float(j)) for j in range(target.shape[1] + 1)]
    for i in range(found.shape[1]):
        new = [torch.full_like(row[0], float(i + 1))]
        for j in range(target.shape[1]):
            replaced = row[j] + (found[:, i] != target[:, j])
            new.append(torch.minimum(torch.minimum(new[j], row[j + 1]) + 1, replaced))
        row = new
    return row[-1]


def quick(loss_fn: LossFunction) -> LossFunction:
    """The same losses as floats, so that they can be subtracted.

    Cross-entropy over few classes with the records on the last axis: torch's softmax over a short last axis is much slower.
    """
    if type(loss_fn) is not nn.CrossEntropyLoss or loss_fn.reduction != "none":
        return lambda output, targets: _floats(loss_fn(output, targets))

    def losses(output: Any, targets: Any) -> Tensor:
        if output.dim() == 2 and targets.dim() == 1 and output.shape[1] < _FEW_CLASSES:
            output, targets = output.t().unsqueeze(0), targets.unsqueeze(0)
            return loss_fn(output, targets)[0]  # type: ignore[no-any-return]
        return loss_fn(output, targets)  # type: ignore[no-any-return]

    return losses


def _floats(losses: Tensor) -> Tensor:
    return losses if losses.is_floating_point() else losses.to(torch.get_default_dtype())
