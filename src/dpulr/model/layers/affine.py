"""Linear layers and convolutions: both multiply rows of features by a matrix.

With X_i (positions x features) and a signal U_i (positions x outputs), a record's gradient is U_i^T X_i. Its norm comes from the
two Gram matrices, the batch's sum is one matrix product: nothing of size batch x parameters is made unless it is the smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpulr.model.layers.base import Call, WeightDeltas, WeightLinearRule, not_cancelled, numel
from dpulr.norms import flat_norm, row_norm, safe_row_norm

_PRODUCTS_AT_ONCE = 2**18
"""Numbers of sums of a few records each that are held before they are added up."""


class AffineRule(WeightLinearRule):
    """Output space of `features @ weight.T + bias`, in groups (a linear layer has one)."""

    handles = frozenset({"weight", "bias"})
    finite_gain_suffices = True

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
        return self._with_bias(_lengths(x), x.shape[2])

    def _with_bias(self, lengths: Tensor, positions: int) -> Tensor:
        """Lengths of features, with the constant 1 of a trained bias in each position."""
        return torch.hypot(lengths, lengths.new_full((), math.sqrt(positions))) if "bias" in self.parameters else lengths

    def gains(self, call: Call) -> Tensor:
        lengths = self._lengths(self.features(call.input))
        return lengths[:, 0] if lengths.shape[1] == 1 else lengths.amax(1)

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        return self._norms(self.features(call.input), self.grouped(signal))

    def joint_norms(self, calls: Sequence[Call], signals: Sequence[Tensor]) -> Tensor:
        """A further call is more positions."""
        x, u = [self.features(call.input) for call in calls], [self.grouped(signal) for signal in signals]
        return self._norms(torch.cat(x, dim=2), torch.cat(u, dim=2))

    def _norms(self, x: Tensor, u: Tensor) -> Tensor:
        positions = x.shape[2]
        bound = row_norm(self._lengths(x).double() * _lengths(u)).to(u.dtype)
        if positions == 1:
            return bound
        x, u = x.double(), u.double()  # the sum may cancel: a norm that comes out too small would let a record through
        if _gradient_is_smaller(positions, u.shape[3], x.shape[3]):
            square = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
            if "weight" in self.parameters:
                square = square + (u.transpose(2, 3) @ x).square().sum((1, 2, 3))
            if "bias" in self.parameters:
                square = square + u.sum(2).square().sum((1, 2))
            return not_cancelled(square.sqrt().to(bound.dtype), bound)
        gram = x @ x.transpose(2, 3) if "weight" in self.parameters else torch.zeros_like(x[..., :1])
        if "bias" in self.parameters:
            gram = gram + 1
        square = ((u @ u.transpose(2, 3)) * gram).sum((1, 2, 3))
        return not_cancelled(square.clamp_min(0).sqrt().to(bound.dtype), bound)

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        u = self.grouped(signal)
        if "weight" in into:
            buffer = into["weight"].view(u.shape[1], u.shape[3], -1)
            if _gradient_is_smaller(u.shape[2], u.shape[3], buffer.shape[2]):
                buffer += self.weight_gradients(call.input, u).sum(0)
            else:
                x = self.features(call.input)
                for g in range(u.shape[1]):
                    buffer[g].addmm_(u[:, g].reshape(-1, u.shape[3]).t(), x[:, g].reshape(-1, x.shape[3]))
        if "bias" in into:
            into["bias"] += u.sum(2).sum(0).flatten()

    def weight_gradients(self, x: Tensor, u: Tensor) -> Tensor:
        """(records, groups, outputs, features): every record's own gradient, from the input and a grouped signal."""
        return u.transpose(2, 3) @ self.features(x)

    def record_gradients(self, call: Call, signal: Tensor) -> Tensor | None:
        """(records, parameters): every record's own gradient, where that is smaller than the features and signals it is made of."""
        u = self.grouped(signal)
        weight = self.parameters.get("weight")
        if weight is not None and not _gradient_is_smaller(u.shape[2], u.shape[3], numel(weight.shape[1:])):
            return None
        parts = {"weight": lambda: self.weight_gradients(call.input, u), "bias": lambda: u.sum(2)}
        return torch.cat([parts[name]().flatten(1) for name in self.parameters], dim=1)


def _gradient_is_smaller(positions: int, outputs: int, features: int) -> bool:
    """Than the features and signals of all positions, and than their Gram matrices."""
    return positions * (features + outputs) > features * outputs


def _lengths(x: Tensor) -> Tensor:
    """(records, groups): norm over positions and features."""
    return safe_row_norm((x if x.is_contiguous() else x.transpose(2, 3)).flatten(2))


class LinearRule(AffineRule):
    """`nn.Linear` with any leading dimensions."""

    shares_positions = True

    def features(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 1, numel(x.shape[1:-1]), x.shape[-1])

    def grouped(self, output: Tensor) -> Tensor:
        return self.features(output)

    def gains(self, call: Call) -> Tensor:
        x = call.input
        return self._with_bias(safe_row_norm(x), 1) if self._one_position(x) else super().gains(call)

    def rows_of_gain(self, call: Call) -> tuple[Tensor, float] | None:
        own = type(self)
        if own.gains is not LinearRule.gains or own.norms is not LinearRule.norms or not self._one_position(call.input):
            return None  # a subclass may know better
        return call.input, float("bias" in self.parameters)

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        """Of one position: |x| |u|."""
        x = call.input
        if not self._one_position(x):
            return super().norms(call, signal)
        return (self._with_bias(safe_row_norm(x), 1).double() * safe_row_norm(signal)).to(signal.dtype)

    def _one_position(self, x: Tensor) -> bool:
        return x.dim() == 2 and "weight" in self.parameters

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        u = signal.reshape(-1, signal.shape[-1])
        if "weight" in into:
            into["weight"].addmm_(u.t(), call.input.reshape(-1, call.input.shape[-1]))
        if "bias" in into:
            into["bias"] += u.sum(0)

    def add_in_parts(self, call: Call, signal: Tensor, into: dict[str, Tensor], together: int) -> None:
        """The same sums by fewer calls; those for the bias wholly in float64. A subclass may have changed `add_gradient`."""
        if not self._one_position(call.input) or type(self).add_gradient is not LinearRule.add_gradient:
            super().add_in_parts(call, signal, into, together)
            return
        weight, x, start = into["weight"], call.input, 0
        records = signal.shape[0]
        whole = records // together
        if 1 < whole <= _PRODUCTS_AT_ONCE // weight.numel():
            start = whole * together
            left, right = (rows[:start].reshape(whole, together, -1) for rows in (signal, x))
            weight += torch.bmm(left.transpose(1, 2), right).sum(0, dtype=weight.dtype)
        total = torch.empty_like(weight, dtype=signal.dtype)
        for i in range(start, records, together):
            weight += torch.mm(signal[i : i + together].t(), x[i : i + together], out=total)
        if "bias" in into:
            into["bias"] += signal.sum(0, dtype=torch.float64)

    def shift(self, call: Call, deltas: WeightDeltas) -> Tensor:
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
        """A transposed view: along the positions memory is read and written in runs, which is ten times faster."""
        conv = self.module
        view = self._patches(x, conv.kernel_size, conv.stride)
        border = 3 + len(conv.kernel_size)
        return view.reshape(*view.shape[:2], numel(view.shape[2:border]), numel(view.shape[border:])).transpose(2, 3)

    def _patches(self, x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """View of the padded input: (records, groups, channels, *kernel, *positions)."""
        conv, x = self.module, self._padded(x)
        strides, dilation = x.stride()[2:], conv.dilation
        steps = [
            (size - d * (k - 1) - 1) // step + 1 for size, k, step, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)
        ]
        channels = x.shape[1] // conv.groups
        return x.as_strided(
            (x.shape[0], conv.groups, channels, *kernel, *steps),
            (
                x.stride(0),
                x.stride(1) * channels,
                x.stride(1),
                *[s * d for s, d in zip(strides, dilation, strict=True)],
                *[s * step for s, step in zip(strides, stride, strict=True)],
            ),
        )

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        """Of the very gradients that are added up, where these are made: then it does not matter how their terms cancel."""
        own = self.record_gradients(call, signal) if self._positions(call) > 1 else None
        if own is None:
            return super().norms(call, signal)
        seen = flat_norm(call.input) * math.sqrt(numel(self.module.kernel_size))  # by all patches together, at most
        bound = torch.hypot(seen, seen.new_full((), math.sqrt(self._positions(call))))
        return not_cancelled(flat_norm(own), bound * flat_norm(signal))

    def sums_positions(self, call: Call) -> bool:
        weight, positions = self.module.weight, self._positions(call)
        return positions > 1 and not _gradient_is_smaller(positions, len(weight) // self.module.groups, numel(weight.shape[1:]))

    @staticmethod
    def _positions(call: Call) -> int:
        return numel(call.output.shape[2:])

    def _lines(self, x: Tensor) -> Tensor:
        """View of the input, with patches along all axes but the first: (records, groups, channels, *taps, lines, *positions)."""
        conv = self.module
        return self._patches(x, (1, *conv.kernel_size[1:]), (1, *conv.stride[1:])).squeeze(3)

    def weight_gradients(self, x: Tensor, u: Tensor) -> Tensor:
        """By taps of the kernel along the first axis: they see the same lines of the image, which need not be copied for each."""
        conv, lines = self.module, self._lines(x)
        taps, stride, dilation = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
        records, groups, channels = lines.shape[:3]
        rest, height, across = numel(conv.kernel_size[1:]), lines.shape[x.dim()], numel(lines.shape[x.dim() + 1 :])
        lines = lines.reshape(records, groups, channels * rest, height, across)
        seen = 1 + stride * (u.shape[2] // across - 1)
        gradients = u.new_empty(records, groups, u.shape[3], channels, taps, rest)
        for a in range(taps):
            tap = lines[:, :, :, a * dilation : a * dilation + seen : stride].flatten(3)
            gradients[..., a, :] = (u.transpose(2, 3) @ tap.transpose(2, 3)).view(*gradients.shape[:4], rest)
        return gradients.flatten(3)

    def second_moment(self, x: Tensor) -> Tensor:
        """(groups, features, features): the sum of f f^T over the patches f of all records.

        A product of two taps of the kernel along the first axis is one of two lines of the image, and for taps equally far apart
        these are the same lines but for a few at the borders.
        """
        conv = self.module
        taps, dilation = conv.kernel_size[0], conv.dilation[0]
        if conv.stride[0] > 1:
            f = self.features(x).transpose(0, 1).flatten(1, 2)
            return f.transpose(1, 2) @ f
        lines = self._lines(x).movedim(0, x.dim())  # behind the lines: those of all records are one matrix
        groups, channels, rest, height = *lines.shape[:2], numel(conv.kernel_size[1:]), lines.shape[x.dim() - 1]
        lines = lines.reshape(groups, channels * rest, height, -1)
        positions = height - dilation * (taps - 1)

        def product(start: int, end: int, apart: int) -> Tensor:
            left, right = lines[:, :, start:end].flatten(2), lines[:, :, start + apart : end + apart].flatten(2)
            return left @ right.transpose(1, 2)

        moment = x.new_empty(groups, channels, taps, rest, channels, taps, rest)
        for between in range(taps):
            apart, last = between * dilation, (taps - 1 - between) * dilation
            shared = product(last, positions, apart) if last < positions else 0
            for a in range(taps - between):
                first = a * dilation
                if last < positions:
                    block = shared + product(first, last, apart) + product(positions, first + positions, apart)
                else:
                    block = product(first, first + positions, apart)
                block = block.view(groups, channels, rest, channels, rest)
                moment[:, :, a, :, :, a + between] = block
                moment[:, :, a + between, :, :, a] = block.permute(0, 3, 4, 1, 2)
        return moment.view(groups, channels * taps * rest, -1)

    def grouped(self, output: Tensor) -> Tensor:
        groups = self.module.groups
        return output.reshape(output.shape[0], groups, output.shape[1] // groups, numel(output.shape[2:])).transpose(2, 3)

    def shift(self, call: Call, deltas: WeightDeltas) -> Tensor:
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
