"""One harness for all layer kinds. A subclass says how to build a random layer and its input; the oracle is `torch.func`.

Everything runs in float64, so that "equal" means equal to ten digits. Each seed gives another shape and other settings, and trains
all parameters or only one of them (bias-only, scale-only).
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from dpulr.model.layers import Call, rule_for
from dpulr.model.sites import Site, make_site
from dpulr.model.trained_layers import Layer

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@dataclass
class Case:
    module: nn.Module
    x: Tensor
    parameters: dict[str, nn.Parameter]

    def call(self, x: Tensor | None = None) -> Call:
        x = self.x if x is None else x
        with torch.inference_mode():
            return Call((x,), {}, self.module(x))

    def site(self, space: Any) -> Site:
        return make_site(Layer("layer", self.module, self.parameters), self.call().output.shape[1:], space)

    def one(self, parameters: Any, x: Tensor) -> Tensor:
        """One record with these weights, as plain torch computes it."""
        return functional_call(self.module, parameters, (x.unsqueeze(0),)).squeeze(0)

    def gradients(self, signal: Tensor) -> Tensor:
        """(records, parameters): the oracle's gradient of <output, signal> for every record."""
        per_record = vmap(grad(lambda p, x, u: (self.one(p, x) * u).sum()), in_dims=(None, 0, 0))
        parts = per_record(_plain(self.parameters), self.x, signal)
        return torch.cat([parts[name].flatten(1) for name in self.parameters], dim=1)

    def jacobians(self) -> Tensor:
        """(records, outputs, parameters)."""
        parts = vmap(jacrev(self.one), in_dims=(None, 0))(_plain(self.parameters), self.x)
        outputs = self.call().output[0].numel()
        return torch.cat([parts[name].reshape(len(self.x), outputs, -1) for name in self.parameters], dim=2)


def _plain(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in parameters.items()}


class WeightSpaceHarness:
    """What every module must satisfy: perturbed weights give what the module gives with these weights."""

    def build(self, pick: random.Random) -> tuple[nn.Module, Tensor]:
        raise NotImplementedError

    @pytest.fixture(params=range(8))
    def case(self, request: pytest.FixtureRequest) -> Case:
        pick = random.Random(request.param)
        torch.manual_seed(request.param)
        module, x = self.build(pick)
        module = module.double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn_like(parameter))
        names = [name for name, _ in module.named_parameters()]
        alone = names[request.param % len(names)] if request.param >= 4 else None
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(alone is None or name == alone)
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        return Case(module, x.double() if x.is_floating_point() else x, trained)

    def test_own_weights_per_record(self, case: Case) -> None:
        site, call = case.site("weight"), case.call()
        delta = torch.randn(3, len(case.x), site.dim, dtype=torch.float64)
        with torch.inference_mode():
            plus, pair = site.moved(call, delta), site.moved_both_ways(call, delta)
        for sign, found in ((1, plus), (1, pair[:3]), (-1, pair[3:])):
            for r in range(3):
                for i, x in enumerate(case.x):
                    moved = site.rule.split(sign * delta[r, i])
                    expected = case.one({n: p.detach() + moved[n] for n, p in case.parameters.items()}, x)
                    torch.testing.assert_close(found[r, i], self.as_perturbed(case, expected, x), **CLOSE)

    def as_perturbed(self, case: Case, expected: Tensor, x: Tensor) -> Tensor:
        """For layers whose rule leaves a part of the weights alone."""
        return expected

    def test_weight_space_gradient(self, case: Case) -> None:
        site, call = case.site("weight"), case.call()
        signal, scale = torch.randn(len(case.x), site.dim).double(), torch.rand(len(case.x)).double()
        torch.testing.assert_close(site.norms(call, signal), signal.norm(dim=1), **CLOSE)
        torch.testing.assert_close(site.gains(call), torch.ones(len(case.x)).double(), **CLOSE)
        torch.testing.assert_close(_added(site, call, signal, scale), (scale.unsqueeze(1) * signal).sum(0), **CLOSE)

    def test_exact_gradients_in_weight_space(self, case: Case) -> None:
        """From a gradient at the output, by plain backpropagation of one record at a time."""
        site, call = case.site("weight"), case.call()
        slope = torch.randn(len(case.x), *call.output.shape[1:]).double()
        found = site.signal_of(call, slope)
        for i, x in enumerate(case.x):
            own = torch.autograd.grad((case.module(x.unsqueeze(0)) * slope[i]).sum(), list(case.parameters.values()))
            torch.testing.assert_close(found[i], torch.cat([g.flatten() for g in own]), **CLOSE)

    def test_empty_batch(self, case: Case) -> None:
        for space in ("weight", "output"):
            if space == "output" and not rule_for(case.module, case.parameters).has_output_space:
                continue
            site = case.site(space)
            call = Call((case.x[:0],), {}, case.call().output[:0])
            assert site.moved(call, torch.zeros(2, 0, site.dim).double()).shape == (2, 0, *site.output_shape)
            assert site.moved_both_ways(call, torch.zeros(2, 0, site.dim).double()).shape == (4, 0, *site.output_shape)
            signal = torch.zeros(0, site.dim).double()
            assert site.norms(call, signal).shape == (0,)
            assert site.gains(call).shape == (0,)
            assert not _added(site, call, signal, torch.ones(0).double()).any()


class LayerHarness(WeightSpaceHarness):
    """For rules with an output space: their norms, gains and gradients against the oracle's."""

    def test_output_space_moves_the_output(self, case: Case) -> None:
        site, call = case.site("output"), case.call()
        delta = torch.randn(2, len(case.x), *site.output_shape).double()
        torch.testing.assert_close(site.moved(call, delta.flatten(2)), call.output + delta, **CLOSE)
        expected = torch.cat([call.output + delta, call.output - delta])
        torch.testing.assert_close(site.moved_both_ways(call, delta.flatten(2)), expected, **CLOSE)

    def test_norms_are_exact(self, case: Case) -> None:
        site, call = case.site("output"), case.call()
        signal = torch.randn(len(case.x), *site.output_shape).double()
        torch.testing.assert_close(site.norms(call, signal.flatten(1)), case.gradients(signal).norm(dim=1), **CLOSE)

    def test_exact_gradients_are_those_of_opacus(self, case: Case) -> None:
        """Per-sample gradients of Opacus, from the same signal at the output."""
        site, call = case.site("output"), case.call()
        signal, scale = torch.randn(len(case.x), *site.output_shape).double(), torch.rand(len(case.x)).double()
        own = self.opacus(case, signal)
        torch.testing.assert_close(site.norms(call, signal.flatten(1)), own.norm(dim=1), rtol=1e-5, atol=1e-5)
        found = _added(site, call, signal.flatten(1), scale)
        torch.testing.assert_close(found, (scale.unsqueeze(1) * own).sum(0), rtol=1e-5, atol=1e-5)

    def opacus(self, case: Case, signal: Tensor) -> Tensor:
        """(records, parameters)."""
        wrapped = GradSampleModule(deepcopy(case.module), batch_first=True, loss_reduction="sum", force_functorch=True)
        (wrapped(case.x) * signal).sum().backward()
        parameters = dict(wrapped._module.named_parameters())
        return torch.cat([parameters[name].grad_sample.flatten(1) for name in case.parameters], dim=1)

    def test_gains_bound_the_operator_norm(self, case: Case) -> None:
        largest = torch.linalg.matrix_norm(case.jacobians(), ord=2)
        gains = case.site("output").gains(case.call())
        assert (gains >= largest * (1 - 1e-12)).all()
        assert (gains <= torch.linalg.matrix_norm(case.jacobians()) * (1 + 1e-12)).all()  # and not needlessly large

    def test_gradient_is_the_scaled_sum(self, case: Case) -> None:
        site, call = case.site("output"), case.call()
        signal, scale = torch.randn(len(case.x), *site.output_shape).double(), torch.rand(len(case.x)).double()
        found = _added(site, call, signal.flatten(1), scale)
        torch.testing.assert_close(found, (scale.unsqueeze(1) * case.gradients(signal)).sum(0), **CLOSE)

    def test_a_record_that_is_not_finite_adds_nothing(self, case: Case) -> None:
        site, signal = case.site("output"), torch.randn(len(case.x), case.site("output").dim).double()
        ones = torch.ones(len(case.x)).double()
        expected = _added(site, case.call(), signal[1:], ones[1:], rows=slice(1, None))
        for poisoned in self._poisoned(case, signal, ones):
            torch.testing.assert_close(_added(site, *poisoned), expected, **CLOSE)

    def _poisoned(self, case: Case, signal: Tensor, scale: Tensor) -> list[tuple[Call, Tensor, Tensor]]:
        bad = torch.zeros(len(case.x), dtype=torch.bool)
        bad[0] = True
        cases = [
            (case.call(), signal.masked_fill(bad.unsqueeze(1), torch.nan), scale),
            (case.call(), signal, scale.masked_fill(bad, torch.inf)),
        ]
        if case.x.is_floating_point():
            x = case.x.clone()
            x[0] = torch.inf
            if not case.site("output").gains(case.call(x))[0].isfinite():  # a bias's gradient does not know the input
                cases.append((case.call(x), signal, scale))
        return cases


def _added(site: Site, call: Call, signal: Tensor, scale: Tensor, rows: slice = slice(None)) -> Tensor:
    call = Call((call.args[0][rows],), {}, call.output[rows])
    part = torch.zeros(site.size, dtype=signal.dtype)
    with torch.inference_mode():
        site.add(call, signal, scale, part)
    return part
