"""Parameters that a pass uses several times: a layer that is called again, layers whose parameters are tied.

A record's gradient in such a parameter is the sum over all uses, and that sum is what is bounded. For exact gradients it is added
up (`SharedSite`). For hidden directions a layer that is called again is moved as one move of its weights would move it, in all of
its calls (`RepeatedSite`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpulr.model.layers import Call, LayerRule
from dpulr.model.layers.base import not_cancelled
from dpulr.model.sites import OutputSite, Site
from dpulr.model.trained_layers import Layer
from dpulr.norms import flat_norm

_NUMBERS = 2**22
"""Gradients of single records are made for so many numbers at a time, where no rule knows the norm of their sum."""


class _SharedRule(LayerRule):
    """The parameters of several uses. `only` is the rule of the one layer that has them, if there is one; `names`: its names."""

    only: LayerRule | None = None
    names: Mapping[str, str] = {}

    def leave_untrained(self, gradients: dict[str, Tensor]) -> None:
        if self.only is not None:
            self.only.leave_untrained({self.names[key]: gradient for key, gradient in gradients.items()})


class SharedSite(Site):
    """The uses of some parameters, as one site. Its calls and signals are lists, one for each use."""

    space = "output"
    scale = 1.0
    _reducible = False

    def __init__(self, members: Sequence[Site]) -> None:
        self.members = list(members)
        names: dict[nn.Parameter, str] = {}
        for site in self.members:
            for name, parameter in site.parameters.items():
                names.setdefault(parameter, f"{site.name}.{name}")
        self._keys = [{name: names[parameter] for name, parameter in site.parameters.items()} for site in self.members]
        shared = {name: parameter for parameter, name in names.items()}
        first = self.members[0]
        modules = dict.fromkeys(site.layer.name for site in self.members)
        layer = Layer(" + ".join(modules), first.layer.module, shared)
        rule = _SharedRule(first.layer.module, shared)
        rule.scratch = first.rule.scratch
        if len(modules) == 1:  # else another use trains what this one leaves alone
            rule.only, rule.names = first.rule, {key: name for name, key in self._keys[0].items()}
        super().__init__(layer, rule, first.output_shape)

    def within(self, subspace: int | None) -> Site:
        return self

    @property
    def label(self) -> str:
        return " + ".join(dict.fromkeys(site.label for site in self.members))

    def _axes(self) -> tuple[int, int]:
        return self.rule.weight_dim, 1

    @property
    def size(self) -> int:
        return self.rule.weight_dim

    def signals_of(self, calls: Sequence[Call], slopes: Sequence[Tensor]) -> list[Tensor]:
        return [site.signal_of(call, slope) for site, call, slope in zip(self.members, calls, slopes, strict=True)]

    def joint_norms(self, calls: Sequence[Call], signals: Sequence[Tensor]) -> Tensor:
        """Norm of each record's sum of gradients over all uses."""
        uses = list(zip(self.members, calls, signals, strict=True))
        rules = [site.rule for site in self.members]
        if len({type(rule) for rule in rules}) == 1 and all(keys == self._keys[0] for keys in self._keys):
            known = rules[0].joint_norms(calls, [_shaped(*use) for use in uses])
            if known is not None:
                return known
        bound = torch.stack([site.norms(call, signal) for site, call, signal in uses]).sum(0)
        rows = max(1, _NUMBERS // self.size)
        parts = [self._summed_norms(uses, start, start + rows) for start in range(0, calls[0].records, rows)]
        return not_cancelled(torch.cat(parts) if parts else bound, bound)

    def _summed_norms(self, uses: list[tuple[Site, Call, Tensor]], start: int, stop: int) -> Tensor:
        """The same for some records, by making their gradients."""
        total: dict[str, Tensor] = {}
        for (site, call, signal), keys in zip(uses, self._keys, strict=True):
            own = _gradients(site, call.rows(start, stop), signal[start:stop])
            for name, gradient in site.rule.split(own).items():
                total[keys[name]] = total[keys[name]] + gradient if keys[name] in total else gradient
        return flat_norm(torch.cat([gradient.flatten(1) for gradient in total.values()], dim=1))

    def add_joint(self, calls: Sequence[Call], signals: Sequence[Tensor], scale: Tensor, part: Tensor) -> None:
        """Add the sum over records and uses of scale_i times the gradient. A record of which one use is not finite adds nothing.

        In float64: what a record adds is bounded, but its uses may be much longer, and cancel.
        """
        views = self.rule.split(part)
        for site, call, signal, keys in zip(self.members, calls, signals, self._keys, strict=True):
            own = torch.zeros(site.size, dtype=part.dtype, device=part.device)
            site.add(call, signal, scale, own, exact=True)
            for name, gradient in site.rule.split(own).items():
                views[keys[name]] += gradient

    def lift(self, part: Tensor, basis: Tensor | None, into: dict[str, Tensor]) -> None:
        for name, view in self.rule.split(part).items():
            into[name].copy_(view)

    # --- what only single sites have ------------------------------------------------------------------------------------
    def moved(self, call: Call, delta: Tensor, length: float = 1.0) -> Tensor:
        raise TypeError("shared parameters can't be moved")

    def moved_both_ways(self, call: Call, delta: Tensor) -> Tensor:
        raise TypeError("shared parameters can't be moved")

    def signal_of(self, call: Call, slope: Tensor) -> Tensor:
        raise TypeError("shared parameters have a signal for each use: signals_of")

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        raise TypeError("shared parameters are bounded over all uses: joint_norms")

    def gains(self, call: Call) -> Tensor:
        raise TypeError("shared parameters have no gain")

    def add(self, call: Call, signal: Tensor, scale: Tensor, part: Tensor, *, finite: bool = False, exact: bool = False) -> None:
        raise TypeError("shared parameters are added over all uses: add_joint")


@dataclass(frozen=True)
class JointCall(Call):
    """All calls of a layer in one pass, as one: the mean of the inputs. `shares` (calls, records): how much each call has of it."""

    shares: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, calls: Sequence[Call], *, constant: bool) -> JointCall:
        """`constant`: the layer has a bias, as if each input had a 1 more."""
        inputs = torch.stack([call.input for call in calls])
        mean = inputs.mean(0)
        shares = torch.einsum("cnd,nd->cn", inputs.flatten(2), mean.flatten(1)) + float(constant)
        length = shares.square().mean(0, keepdim=True).sqrt()
        return cls((mean,), {}, calls[0].output, shares=torch.where(length > 0, shares / length, 1).nan_to_num(1, 1, 1))


class RepeatedSite(SharedSite):
    """A linear layer or convolution that a pass calls several times, under hidden directions.

    With x the mean of a record's inputs, its weights move by a multiple of z x^T: the call with input x_t moves by z times x . x_t,
    brought to a mean square of 1 over the calls. What the record adds is b z x^T, as if the layer had been called once, with x. So
    it is bounded as for one call, and where the input is the same in all calls, the estimate is that of all of them together.
    """

    def __init__(self, members: Sequence[Site], subspace: int | None = None) -> None:
        self._one = members[0].within(subspace)
        super().__init__(members)
        self.kept, self.reduced, self.dim, self.full_dim = self._one.kept, self._one.reduced, self._one.dim, self._one.full_dim

    def within(self, subspace: int | None) -> Site:
        return RepeatedSite(self.members, subspace)

    def _axes(self) -> tuple[int, int]:
        return self._one.width, self._one.positions

    @property
    def size(self) -> int:
        return self._one.size

    def joint(self, calls: Sequence[Call]) -> JointCall:
        return JointCall.of(calls, constant="bias" in self._one.parameters)

    def gains(self, call: Call) -> Tensor:
        return self._one.gains(call)

    def add(self, call: Call, signal: Tensor, scale: Tensor, part: Tensor, *, finite: bool = False, exact: bool = False) -> None:
        self._one.add(call, signal, scale, part, finite=finite, exact=exact)

    def lift(self, part: Tensor, basis: Tensor | None, into: dict[str, Tensor]) -> None:
        self._one.lift(part, basis, {name: into[key] for name, key in self._keys[0].items()})


def _shaped(site: Site, call: Call, signal: Tensor) -> Tensor:
    return signal.view(-1, *call.output.shape[1:]) if isinstance(site, OutputSite) else signal


def _gradients(site: Site, call: Call, signal: Tensor) -> Tensor:
    """(records, parameters): each record's own gradient, made whole."""
    if not isinstance(site, OutputSite):
        return signal
    return site.rule.record_weight_gradients(call, _shaped(site, call, signal))
