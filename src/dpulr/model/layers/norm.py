"""Layers that scale and shift normalised values: LayerNorm, RMSNorm, GroupNorm.

With normalised values V_i (positions x features), a signal U_i gives the gradients sum_p U*V (scale) and sum_p U (shift).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpulr.model.layers.base import Call, WeightDeltas, WeightLinearRule, not_cancelled, numel
from dpulr.norms import flat_norm


class ScaleRule(WeightLinearRule):
    """Output space and weight space of `normalised * weight + bias`."""

    handles = frozenset({"weight", "bias"})
    finite_gain_suffices = True

    def normalised(self, x: Tensor) -> Tensor:
        """The layer's output with weight 1 and bias 0."""
        raise NotImplementedError

    def rows(self, output: Tensor) -> Tensor:
        """Output-shaped tensor as (records, positions, features)."""
        raise NotImplementedError

    def unrows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `rows`, for (repeats, records, positions, features)."""
        raise NotImplementedError

    def factor(self, call: Call) -> Tensor:
        return self.normalised(call.input)

    def _per_record(self, call: Call, signal: Tensor) -> dict[str, Tensor]:
        u = self.rows(signal)
        parts = {}
        if "weight" in self.parameters:
            parts["weight"] = (u * self.rows(self.normalised(call.input))).sum(1)
        if "bias" in self.parameters:
            parts["bias"] = u.sum(1)
        return parts

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        norm = flat_norm(torch.cat(list(self._per_record(call, signal).values()), dim=1))
        return not_cancelled(norm, flat_norm(signal))  # normalised values are about 1 long

    def gains(self, call: Call) -> Tensor:
        v = self.rows(self.normalised(call.input)).double()
        square = v.square().sum(1) if "weight" in self.parameters else torch.zeros_like(v[:, 0])
        if "bias" in self.parameters:
            square = square + v.shape[1]
        return square.amax(1).sqrt().to(call.output.dtype)

    def sums_positions(self, call: Call) -> bool:
        return False

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        for name, part in self._per_record(call, signal).items():
            into[name] += part.sum(0).view_as(into[name])

    def shift(self, call: Call, deltas: WeightDeltas) -> Tensor:
        v = self.rows(self.normalised(call.input))
        any_delta = next(iter(deltas.values()))
        total = torch.zeros(*any_delta.shape[:2], *v.shape[1:], dtype=v.dtype, device=v.device)
        if "weight" in deltas:
            total = total + v * deltas["weight"].flatten(2).unsqueeze(2)
        if "bias" in deltas:
            total = total + deltas["bias"].flatten(2).unsqueeze(2)
        return self.unrows(total, call.output.shape[1:])


class LayerNormRule(ScaleRule):
    """`nn.LayerNorm` and `nn.RMSNorm`: the features are the normalised axes."""

    module: nn.LayerNorm | nn.RMSNorm

    def normalised(self, x: Tensor) -> Tensor:
        shape = list(self.module.normalized_shape)
        if isinstance(self.module, nn.RMSNorm):
            return F.rms_norm(x, shape, eps=self.module.eps)
        return F.layer_norm(x, shape, eps=self.module.eps)

    def rows(self, output: Tensor) -> Tensor:
        axes = len(self.module.normalized_shape)
        return output.reshape(output.shape[0], numel(output.shape[1:-axes]), numel(self.module.normalized_shape))

    def unrows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.reshape(*rows.shape[:2], *shape)


class GroupNormRule(ScaleRule):
    """`nn.GroupNorm`: the features are the channels, the positions are the pixels."""

    module: nn.GroupNorm

    def normalised(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.module.num_groups, eps=self.module.eps)

    def rows(self, output: Tensor) -> Tensor:
        return output.flatten(2).transpose(1, 2) if output.dim() > 2 else output.unsqueeze(1)

    def unrows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.transpose(2, 3).reshape(*rows.shape[:2], *shape)
