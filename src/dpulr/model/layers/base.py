"""What a layer kind has to say: how its output moves with its weights, and how a signal at its output becomes a gradient.

A *record* is one row of the batch. A perturbation has shape (repeats, records, *shape), a signal (records, *shape).
`LayerRule` works in weight space for any module; a subclass adds output space where its Jacobian has a simple form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.model.rescue import each_alone, together_or_apart
from dpulr.model.scratch import NO_SCRATCH

WeightDeltas = Mapping[str, Tensor]
"""How far each parameter is moved: (repeats, records, *shape)."""


@dataclass(frozen=True)
class Call:
    """One clean call of a layer: its arguments and its output. Arguments that carry records are marked in `per_record`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    per_record: tuple[bool, ...] = field(default=(True,))

    @property
    def input(self) -> Tensor:
        """The first argument, which for all known layers is the input."""
        tensor: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return tensor

    @property
    def records(self) -> int:
        return self.output.shape[0]

    def rows(self, start: int, stop: int) -> Call:
        """The same call for some of its records."""
        if len(self.args) == 1 and not self.kwargs and self.per_record == (True,):  # nearly all layers: quicker
            return Call((self.args[0][start:stop],), {}, self.output[start:stop], self.per_record)
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        kept = [leaf[start:stop] if marked else leaf for leaf, marked in zip(leaves, self.per_record, strict=True)]
        args, kwargs = pytree.tree_unflatten(kept, spec)
        return Call(args, kwargs, self.output[start:stop], self.per_record)

    def chosen(self, rows: Tensor) -> Call:
        """The same call for these of its records."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        args, kwargs = pytree.tree_unflatten(
            [leaf[rows] if marked else leaf for leaf, marked in zip(leaves, self.per_record, strict=True)], spec
        )
        return Call(args, kwargs, self.output[rows], self.per_record)

    def doubled(self) -> Call:
        """The same call with its floats in float64."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        wide = [leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(wide, spec)
        return Call(args, kwargs, self.output, self.per_record)

    def detached(self) -> Call:
        """The same call without its history."""
        args, kwargs, output = without_history((self.args, self.kwargs, self.output))
        return Call(args, kwargs, output, self.per_record)

    def without(self, bad: Tensor) -> Call:
        """The same call with the tensors of the records marked in `bad` set to zero."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        kept = [
            leaf.masked_fill(bad.view(-1, *[1] * (leaf.dim() - 1)), 0) if marked else leaf
            for leaf, marked in zip(leaves, self.per_record, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(kept, spec)
        return Call(args, kwargs, self.output, self.per_record)


def without_history(values: Any) -> Any:
    """The same values, of which autograd remembers nothing. What layers usually get and give takes no slow walk by pytree."""
    kind = type(values)
    if kind is Tensor:
        return values.detach() if values.requires_grad else values
    if kind is tuple or kind is list:
        return kind(map(without_history, values))
    if kind is dict:
        return {key: without_history(value) for key, value in values.items()}
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, values)


class LayerRule:
    """Weight space for any module: run it with each record's own weights. No Jacobian is needed."""

    has_output_space: ClassVar[bool] = False
    handles: ClassVar[frozenset[str] | None] = None
    """Names of the parameters that the rule knows; None: any."""
    shares_positions: ClassVar[bool] = False
    """True if a signal may be expressed in a smaller basis of the output's last axis (a public subspace)."""
    finite_gain_suffices: ClassVar[bool] = False
    """True if a finite gain proves that a record's input is finite, and a finite norm that its signal is, too: no second look is
    needed."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.module = module
        self.parameters = dict(parameters)
        self.weight_dim = sum(p.numel() for p in self.parameters.values())
        self.scratch = NO_SCRATCH

    # --- weight space -------------------------------------------------------------------------------------------------
    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the last axis of `flat` in the shapes of the parameters."""
        sizes = [p.numel() for p in self.parameters.values()]
        parts = torch.split(flat, sizes, dim=-1)
        return {name: part.view(*flat.shape[:-1], *p.shape) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def with_weights(self, call: Call, flat: Tensor) -> Tensor:
        """Outputs (repeats, records, *out) when record i of repeat r uses the weights plus flat[r, i]."""
        repeats, records = flat.shape[:2]
        if repeats * records == 0:
            return call.output.new_zeros(repeats, records, *call.output.shape[1:])
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        stacked = {name: (delta + self.parameters[name]).flatten(0, 1) for name, delta in self.split(flat).items()}
        rows = [
            leaf.unsqueeze(1).repeat(repeats, *[1] * leaf.dim()) if marked else leaf
            for leaf, marked in zip(leaves, call.per_record, strict=True)
        ]
        in_dims = [0 if marked else None for marked in call.per_record]

        def one(weights: dict[str, Tensor], *values: Any) -> Tensor:
            args, kwargs = pytree.tree_unflatten(values, spec)
            with self.scratch.fresh():
                out: Tensor = torch.func.functional_call(self.module, weights, args, kwargs)
            return out

        def together() -> Tensor:
            out: Tensor = torch.vmap(one, in_dims=(0, *in_dims), randomness="different")(stacked, *rows)
            return out

        def apart() -> Tensor:
            """For what vmap can't batch (control flow, recurrent kernels), and for a black box that raises."""
            out = torch.full((repeats * records, 1, *call.output.shape[1:]), math.nan).to(call.output)

            def row(i: int) -> None:
                own = [value[i] if marked else value for value, marked in zip(rows, call.per_record, strict=True)]
                out[i] = one({name: w[i] for name, w in stacked.items()}, *own)

            each_alone(range(repeats * records), row)
            return out

        return together_or_apart(together, apart, alive=lambda: None).view(repeats, records, *call.output.shape[1:])

    def record_weight_gradients(self, call: Call, slope: Tensor) -> Tensor:
        """(records, weights): each record's gradient, from the gradient at its output. It is made whole: the module is unknown."""
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        parameters = {name: parameter.detach() for name, parameter in self.parameters.items()}
        rows = [leaf.unsqueeze(1) if marked else leaf for leaf, marked in zip(leaves, call.per_record, strict=True)]
        in_dims = [0 if marked else None for marked in call.per_record]

        def one(own_slope: Tensor, *values: Any) -> Tensor:
            args, kwargs = pytree.tree_unflatten(values, spec)
            with self.scratch.fresh():
                pull: Any = torch.func.vjp(lambda w: torch.func.functional_call(self.module, w, args, kwargs), parameters)[1]
            (found,) = pull(own_slope.unsqueeze(0))
            return torch.cat([found[name].flatten() for name in self.parameters])

        def together() -> Tensor:
            out: Tensor = torch.vmap(one, in_dims=(0, *in_dims), randomness="different")(slope, *rows)
            return out

        def apart() -> Tensor:
            out = torch.full((call.records, self.weight_dim), math.nan).to(slope)

            def row(i: int) -> None:
                out[i] = one(
                    slope[i], *[value[i] if marked else value for value, marked in zip(rows, call.per_record, strict=True)]
                )

            each_alone(range(call.records), row)
            return out

        with torch.inference_mode(False), torch.enable_grad():
            return together_or_apart(together, apart, alive=lambda: None).detach()

    def weight_pair(self, call: Call, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs at plus and at minus `flat`."""
        return self.with_weights(call, flat), self.with_weights(call, -flat)

    def leave_untrained(self, gradients: dict[str, Tensor]) -> None:
        """Set to zero what torch never gives a gradient: noise must not move it either."""

    # --- output space -------------------------------------------------------------------------------------------------
    def norms(self, call: Call, signal: Tensor) -> Tensor:
        """Exact norm of each record's gradient J_i^T signal_i, signal of the output's shape."""
        raise TypeError(f"{type(self.module).__name__} has no output space")

    def joint_norms(self, calls: Sequence[Call], signals: Sequence[Tensor]) -> Tensor | None:
        """Exact norm of each record's sum of gradients over several calls; None where it takes the gradients themselves."""
        return None

    def gains(self, call: Call) -> Tensor:
        """For each record an upper bound of ||J_i||: how much longer than its signal its gradient can be."""
        raise TypeError(f"{type(self.module).__name__} has no output space")

    def rows_of_gain(self, call: Call) -> tuple[Tensor, float] | None:
        """(records, width) and a number: the length of a row with that number behind it is the gain, and a gradient is as long as
        gain times signal. None: there is more to it. Those of several layers are computed together."""
        return None

    def factor(self, call: Call) -> Tensor:
        """What a signal is multiplied with to become a gradient, one row per record."""
        return call.input

    def sums_positions(self, call: Call) -> bool:
        """Whether `add_gradient` adds up a record's positions and the records in one sum: terms may then cancel, so it is exact."""
        return call.output.dim() > 2

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        """Add sum_i J_i^T signal_i to `into`, one buffer per parameter."""
        raise TypeError(f"{type(self.module).__name__} has no output space")

    def add_in_parts(self, call: Call, signal: Tensor, into: dict[str, Tensor], together: int) -> None:
        """The same for buffers in float64: `together` records at a time are added up in the model's own precision."""
        totals = {name: torch.empty_like(buffer, dtype=signal.dtype) for name, buffer in into.items()}
        for start in range(0, len(signal), together):
            for total in totals.values():
                total.zero_()
            self.add_gradient(call.rows(start, start + together), signal[start : start + together], totals)
            for name, total in totals.items():
                into[name] += total


class WeightLinearRule(LayerRule):
    """For layers whose output is affine in their weights: perturbing them adds a shift to the clean output."""

    has_output_space = True

    def shift(self, call: Call, deltas: WeightDeltas) -> Tensor:
        """(repeats, records, *out): what weights moved by `deltas` add to the output."""
        raise NotImplementedError

    def with_weights(self, call: Call, flat: Tensor) -> Tensor:
        return call.output + self.shift(call, self.split(flat))

    def weight_pair(self, call: Call, flat: Tensor) -> tuple[Tensor, Tensor]:
        shift = self.shift(call, self.split(flat))
        return call.output + shift, call.output - shift


def not_cancelled(norm: Tensor, bound: Tensor) -> Tensor:
    """`norm`, but not below the rounding of sums whose terms are as long as `bound`.

    A record whose terms cancel almost wholly is scaled as if it were that long: rounding, scaled up, could exceed the clip.
    """
    return torch.maximum(norm, _CANCELLATION * bound)


_CANCELLATION = 1e-4


def numel(shape: Iterable[int]) -> int:
    return math.prod(shape)
