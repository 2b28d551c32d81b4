"""Linear layers and convolutions: both multiply rows of features by a matrix.

With X_i (positions x features) and a signal U_i (positions x outputs), a record's gradient is U_i^T X_i. Its norm comes from the
two Gram matrices, the batch's sum is one matrix product: nothing of size batch x parameters is made unless it is the smaller one.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpulr.layers.base import Call, Deltas, WeightLinearRule, not_cancelled, numel, row_norm


class AffineRule(WeightLinearRule):
    """Output space of `features @ weight.T + bias`, in groups (a linear layer has one)."""

    handles = frozenset({"weight", "bias"})

    def features(self, x: Tensor) -> Tensor:
        """(records, groups, positions, features)."""
        raise NotImplementedError

    def grouped(self, output: Tensor) -> Tensor:
        """Output-shaped tensor as (records, groups, positions, outputs of a group)."""
        raise NotImplementedError

    def _lengths(self, x: Tensor) -> Tensor:
        """(records, groups): norm of the features, with the constant 1 of a trained bias."""
        if "weight" not in self.parameters:
            return torch.full(x.shape[:2], math.sqrt(x.shape[2]), dtype=x.dtype, device=x.device)
        lengths = _lengths(x)
        return torch.hypot(lengths, lengths.new_full((), math.sqrt(x.shape[2]))) if "bias" in self.parameters else lengths

    def gains(self, call: Call) -> Tensor:
        lengths = self._lengths(self.features(call.input))
        return lengths[:, 0] if lengths.shape[1] == 1 else lengths.amax(1)

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        x, u = self.features(call.input), self.grouped(signal)
        positions = x.shape[2]
        bound = row_norm(self._lengths(x).double() * _lengths(u)).to(signal.dtype)
        if positions == 1:
            return bound
        if positions * (x.shape[3] + u.shape[3]) > x.shape[3] * u.shape[3]:  # the gradient is smaller than the Gram matrices
            square = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
            if "weight" in self.parameters:
                square = square + (u.transpose(2, 3) @ x).square().sum((1, 2, 3))
            if "bias" in self.parameters:
                square = square + u.sum(2).square().sum((1, 2))
            return not_cancelled(square.sqrt(), bound)
        x, u = x.double(), u.double()  # the sum may cancel: a norm that comes out too small would let a record through
        gram = x @ x.transpose(2, 3) if "weight" in self.parameters else torch.zeros_like(x[..., :1])
        if "bias" in self.parameters:
            gram = gram + 1
        square = ((u @ u.transpose(2, 3)) * gram).sum((1, 2, 3))
        return not_cancelled(square.clamp_min(0).sqrt().to(bound.dtype), bound)

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        x, u = self.features(call.input), self.grouped(signal)
        groups = x.shape[1]
        if "weight" in into:
            buffer = into["weight"].view(groups, u.shape[3], x.shape[3])
            for g in range(groups):
                buffer[g].addmm_(u[:, g].reshape(-1, u.shape[3]).t(), x[:, g].reshape(-1, x.shape[3]))
        if "bias" in into:
            into["bias"] += u.sum((0, 2)).flatten()


def _lengths(x: Tensor) -> Tensor:
    """(records, groups): norm over positions and features, computed in float64 where the squares leave the range of float32.

    They must not vanish: a record would pass as short.
    """
    rows = x.flatten(2)
    lengths = row_norm(rows)
    if lengths.numel():
        shortest, longest = torch.aminmax(lengths)
        if not (shortest.item() > _LEAST and longest.item() < _MOST):
            lengths = row_norm(rows.double()).to(x.dtype)
    return lengths


_LEAST, _MOST = 1e-10, 1e15


class LinearRule(AffineRule):
    """`nn.Linear` with any leading dimensions."""

    shares_positions = True

    def features(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 1, numel(x.shape[1:-1]), x.shape[-1])

    def grouped(self, output: Tensor) -> Tensor:
        return self.features(output)

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        u = signal.reshape(-1, signal.shape[-1])
        if "weight" in into:
            into["weight"].addmm_(u.t(), call.input.reshape(-1, call.input.shape[-1]))
        if "bias" in into:
            into["bias"] += u.sum(0)

    def shift(self, call: Call, deltas: Deltas) -> Tensor:
        x = call.input
        rows = x.reshape(x.shape[0], numel(x.shape[1:-1]), x.shape[-1])  # records, positions, features
        any_delta = next(iter(deltas.values()))
        out = torch.zeros(*any_delta.shape[:2], rows.shape[1], call.output.shape[-1], dtype=rows.dtype, device=rows.device)
        if "weight" in deltas:
            out = rows @ deltas["weight"].transpose(-1, -2)
        if "bias" in deltas:
            out = out + deltas["bias"].unsqueeze(2)
        return out.view(*any_delta.shape[:2], *call.output.shape[1:])


class ConvRule(AffineRule):
    """`nn.Conv1d`, `Conv2d`, `Conv3d` with stride, padding, dilation and groups, by patches of the input."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def _padded(self, x: Tensor) -> Tensor:
        conv = self.module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        twice = cast(Any, conv)._reversed_padding_repeated_twice
        return F.pad(x, twice, mode=mode) if any(twice) else x

    def features(self, x: Tensor) -> Tensor:
        conv, x = self.module, self._padded(x)
        spatial = x.shape[2:]
        steps = [
            (size - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, dilation in zip(spatial, conv.kernel_size, conv.stride, conv.dilation, strict=True)
        ]
        strides = x.stride()[2:]
        channels = x.shape[1] // conv.groups
        view = x.as_strided(
            (x.shape[0], conv.groups, *steps, channels, *conv.kernel_size),
            (
                x.stride(0),
                x.stride(1) * channels,
                *[s * step for s, step in zip(strides, conv.stride, strict=True)],
                x.stride(1),
                *[s * d for s, d in zip(strides, conv.dilation, strict=True)],
            ),
        )
        return view.reshape(x.shape[0], conv.groups, numel(steps), channels * numel(conv.kernel_size))

    def grouped(self, output: Tensor) -> Tensor:
        groups = self.module.groups
        return output.reshape(output.shape[0], groups, output.shape[1] // groups, numel(output.shape[2:])).transpose(2, 3)

    def shift(self, call: Call, deltas: Deltas) -> Tensor:
        """One grouped convolution: each record is a group of its own, its repeats are output channels."""
        conv, x, out_shape = self.module, call.input, call.output.shape[1:]
        repeats, records = next(iter(deltas.values())).shape[:2]
        out = torch.zeros(repeats, records, *[1] * len(out_shape), dtype=x.dtype, device=x.device)
        if "weight" in deltas and records > 0:
            groups, per_group = conv.groups, conv.out_channels // conv.groups
            weight = deltas["weight"]
            weight = weight.view(repeats, records, groups, per_group, *weight.shape[3:])
            weight = weight.movedim(0, 2).flatten(0, 3)  # records, groups, repeats, out
            padded = self._padded(x)
            convolve = (F.conv1d, F.conv2d, F.conv3d)[len(conv.kernel_size) - 1]
            result = convolve(
                padded.reshape(1, -1, *padded.shape[2:]),
                weight,
                stride=cast(Any, conv.stride),
                dilation=cast(Any, conv.dilation),
                groups=records * groups,
            )
            result = result.view(records, groups, repeats, per_group, *out_shape[1:])
            out = result.movedim(2, 0).flatten(2, 3)
        if "bias" in deltas:
            out = out + deltas["bias"].view(repeats, records, conv.out_channels, *[1] * (len(out_shape) - 1))
        return out.expand(repeats, records, *out_shape)
